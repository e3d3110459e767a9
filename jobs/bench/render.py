"""Render benchmark reports: ``python jobs/bench/render.py FOLDER PAGE`` reads FOLDER/*.json, writes PAGE."""

from __future__ import annotations

import sys
from pathlib import Path

from _report import Report

HEAD = """# Benchmarks

Every benchmark is a job under `jobs/bench/`; `make bench` runs them all and renders this page, so edit the jobs and not
this page. Medians; in brackets the least and the greatest measurement.
"""


def page(reports: list[Report]) -> str:
    """The whole page, by title."""
    return "\n".join([HEAD, *(report.markdown() for report in sorted(reports, key=lambda report: report.title))])


def main(folder: str, target: str) -> int:
    """Write the page; 1 and a message if there is nothing to show, or a file is damaged."""
    try:
        reports = [Report.read(path) for path in sorted(Path(folder).glob("*.json"))]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if not reports:
        print(f"{folder}: holds no benchmark reports (*.json); run `make bench` first", file=sys.stderr)
        return 1
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    Path(target).write_text(page(reports), encoding="utf-8")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: render.py FOLDER PAGE")
    sys.exit(main(sys.argv[1], sys.argv[2]))
