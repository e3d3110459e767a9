"""The catalogue as tables of ``docs/metrics.md``.

``python -m planaria.metrics.document docs/metrics.md`` renews them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from planaria.metrics.catalogue import METRICS, Metric

BEGIN, END = "<!-- catalogue -->", "<!-- end of the catalogue -->"


def tables() -> str:
    """Markdown: one table per group."""
    lines: list[str] = []
    for group, metrics in METRICS.items():
        lines += [f"### {group}", "", "| metric | type | labels | what it says |", "|-|-|-|-|"]
        lines += [_row(metric) for metric in metrics] + [""]
    return "\n".join(lines)


def renewed(page: str) -> str:
    """``page`` with the present tables between its two marks.

    Raises:
        ValueError: a mark is missing.
    """
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"the page needs {BEGIN} and {END}, with the tables between them")
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


def _row(metric: Metric) -> str:
    known = dict(metric.values)
    labels = "; ".join(
        f"`{label}`" + (f": {', '.join(known[label])}" if label in known else "") for label in metric.labels
    )
    star = " \\*" if metric.mirrored else ""
    return f"| `{metric.name}`{star} | {metric.kind} | {labels} | {metric.help} |"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(renewed(file.read_text(encoding="utf-8")), encoding="utf-8")
