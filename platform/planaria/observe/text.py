"""Numbers, bars and rows as text: pure functions under the live view, the summary and ``planaria status``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*#@"


def percent(value: float | None) -> str:
    """A share as a percentage; None is what a record holds of a number that was none."""
    return "not a number" if value is None else f"{value:.1%}"


def sparkline(values: Sequence[float], width: int, *, plain: bool = False) -> str:
    """``values`` as at most ``width`` blocks between their minimum and maximum.

    Numbers that are not finite are left out. ``plain`` draws with ASCII characters.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    cells = min(width, len(finite))
    edges = [len(finite) * cell // cells for cell in range(cells + 1)]
    means = [sum(finite[lo:hi]) / (hi - lo) for lo, hi in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    blocks = ASCII_BLOCKS if plain else BLOCKS
    # Divided first: the reciprocal of a span that is hardly more than nothing has no finite value.
    heights = [(mean - low) / (high - low) if high > low else 0.0 for mean in means]
    return "".join(blocks[round(height * (len(blocks) - 1))] for height in heights)


def bar(done: float, total: float, width: int, *, plain: bool = False) -> str:
    """A progress bar of ``width`` characters."""
    share = min(1.0, max(0.0, done / total)) if total > 0 else 0.0
    filled = int(share * width)
    on, off = ("#", "-") if plain else ("━", "─")
    return on * filled + off * (width - filled)


def duration(seconds: float | None) -> str:
    """``0.84 s``, ``12.3 s``, ``4 min 05 s``, ``2 h 07 min``; ``-`` for None."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def quantity(value: float | None) -> str:
    """A count or rate with three digits: ``940``, ``18.2k``, ``1.25M``; ``-`` for None."""
    if value is None or not math.isfinite(value):
        return "-"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit * 0.9995:
            scaled = value / limit
            return f"{scaled:.{2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0}f}{unit}"
    return f"{value:.0f}"


def number(value: float | None) -> str:
    """A loss: four significant digits; ``-`` for None, ``nan`` and ``inf`` as they are."""
    return "-" if value is None else f"{value:.4g}"


def share(part: float, whole: float) -> str:
    """``part`` of ``whole`` as a percentage."""
    return f"{100 * part / whole:.0f}%" if whole else "-"


def cause(text: str) -> str:
    """Why a generation began, for a person who does not know the controller's words."""
    return {"start": "start", "resize": "workers joined"}.get(text, text)


COLUMNS = ("gen", "layout", "workers", "why it began", "steps", "recovery")
"""Headings of :func:`generation_cells`; recovery is the time from the fault to the first new step."""


def generation_cells(rows: Iterable[Mapping[str, Any]], *, plain: bool = False) -> list[tuple[str, ...]]:
    """One tuple of cells, in the order of :data:`COLUMNS`, per row of the controller's generation table.

    Steps are shown 1-based: ``1-150`` did the first 150 steps.
    """
    cells: list[tuple[str, ...]] = []
    for row in rows:
        first, last = row["from_step"] + 1, row["to_step"]
        steps = "none" if last < first else f"{first}{'-' if plain else '–'}{last}"  # noqa: RUF001
        spares = f" +{row['spares']}" if row.get("spares") else ""
        cells.append(
            (
                str(row["generation"]),
                str(row["layout"]),
                f"{row['workers']}{spares}",
                cause(row["cause"]),
                steps,
                duration(row.get("recovery_s")),
            )
        )
    return cells


CLASS_NAMES = {
    "productive": "productive steps",
    "data_wait": "data wait",
    "checkpoint": "checkpoints",
    "recovery": "recovery",
    "resize": "change of size",
    "waiting": "too few workers",
    "startup": "start-up",
    "evaluation": "evaluation",
    "lost": "undone work",
    "other": "other",
    "under_way": "step under way",
}
"""What a person calls the classes of the account of wall time; the phases of recovery together."""
NO_LOSS = (CLASS_NAMES["productive"], CLASS_NAMES["under_way"])
SMALLEST_LOSS = 0.001
"""Share of the wall time below which a loss is not worth a word."""


def goodput_rows(account: Mapping[str, float]) -> list[tuple[str, float, dict[str, float]]]:
    """(name, seconds, phases) of the classes that took any time: productive steps, then the losses, largest first."""
    phases = {name.removeprefix("recovery_"): value for name, value in account.items() if name.startswith("recovery_")}
    totals = {"recovery": sum(phases.values())} | {name: account[name] for name in CLASS_NAMES if name in account}
    losses = sorted((name for name in totals if name != "productive"), key=lambda name: -totals[name])
    return [
        (CLASS_NAMES[name], totals[name], {k: v for k, v in phases.items() if v > 0} if name == "recovery" else {})
        for name in ("productive", *losses)
        if totals[name] > 0
    ]


def goodput_text(account: Mapping[str, float] | None, most: int = 3) -> str | None:
    """``91.3%; most lost to start-up 6.10 s, recovery 1.20 s``: the productive share, and the largest losses."""
    if not account or not account["wall"]:
        return None
    losses = [
        f"{name} {duration(seconds)}"
        for name, seconds, _ in goodput_rows(account)
        if seconds >= SMALLEST_LOSS * account["wall"] and name not in NO_LOSS
    ]
    share = f"{100 * account['goodput']:.1f}%"
    return f"{share}; most lost to {', '.join(losses[:most])}" if losses else share


def live_rows(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The generation table of a status, its last row brought up to the step that the job has reached."""
    rows = [dict(row) for row in status["generations"]]
    if rows and rows[-1]["generation"] == status["generation"]:
        rows[-1]["to_step"] = max(rows[-1]["to_step"], status["step"])
    return rows


def progress_line(status: Mapping[str, Any]) -> str:
    """A status as one line of a log."""
    parts = [f"step {status['step']}/{status['total_steps']}"]
    if status["loss"] is not None:
        parts.append(f"loss {number(status['loss'])}")
        parts.append(f"{quantity(status['tokens_per_s'])} tok/s")
        parts.append(f"{status['step_s']:.2f} s/step")
    if status["generation"]:
        parts.append(f"gen {status['generation']} {status['layout']}")
    parts.append(f"workers {status['workers']}/{status['ready']}")
    if status.get("goodput"):
        parts.append(f"goodput {100 * status['goodput']['goodput']:.1f}%")
    if status["checkpoint_step"] is not None:
        parts.append(f"checkpoint {status['checkpoint_step']}")
    if status["bad_samples"]:
        parts.append(f"bad samples {status['bad_samples']}")
    return "  ".join(parts)


def quarantine_text(nodes: Iterable[Mapping[str, Any]]) -> str | None:
    """Nodes that were left alone for a while, and why; None if there were none.

    Args:
        nodes: rows as :meth:`planaria.control.nodes.NodeTrust.listing` makes them.
    """
    texts = []
    for row in nodes:
        if row.get("times") or row.get("quarantined"):
            left = f"{duration(row['seconds_left'])} left" if row.get("quarantined") else "over"
            texts.append(f"{str(row['node'])[:8]} ({row['times']}x, {left}: {row['reason']})")
    return ", ".join(texts) or None


def score_text(evaluation: Mapping[str, Any] | None) -> str | None:
    """The held-out score beside chance, or the share of exact matches where nothing admits a guess."""
    if not evaluation:
        return None
    if "image_to_text_1" in evaluation:
        return _retrieval_text(evaluation)
    if evaluation["questions"]:
        accuracy, chance = evaluation["accuracy"], evaluation["chance"]
        ratio = f" ({accuracy / chance:.1f}x)" if chance and accuracy is not None else ""
        return (
            f"{percent(accuracy)} of {evaluation['questions']} questions answered right; "
            f"chance is {percent(chance)}{ratio}"
        )
    return f"{percent(evaluation['exact_match'])} of {evaluation['samples']} references reproduced in full"


def _retrieval_text(evaluation: Mapping[str, Any]) -> str:
    """Recall both ways beside chance."""
    depths, samples = (1, 5, 10), evaluation["samples"]

    def listed(shares: Iterable[float]) -> str:
        return " / ".join(f"{100 * share:.1f}" for share in shares)

    found = "; ".join(
        f"{name} {listed(evaluation[f'{key}_{depth}'] for depth in depths)}%"
        for name, key in (("image to text", "image_to_text"), ("text to image", "text_to_image"))
    )
    chance = listed(min(1.0, depth / max(1, samples)) for depth in depths)
    return f"recall at 1 / 5 / 10 among {samples} pairs: {found}; chance is {chance}%"
