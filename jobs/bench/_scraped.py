"""Step times while Prometheus scrapes, beside those while nobody does: windows that alternate within one run."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import _report as report
from _measure import Step
from _peers.planaria_job import run_dir
from _peers.work import Work
from _runs import carried_out, load
from planaria.observe.record import read_lines

WINDOW_S = 5.0
"""Length of a window; scrapes come once a second in every other one."""
SCRAPED = "planaria-scraped"
SCRAPED_S = 150.0
ENDLESS = 1_000_000
LEAST_STEPS = 3
"""A window with fewer whole steps says nothing."""


@dataclass
class Scraper:
    """Called about once a second: scrapes, if the window is one in which that is done."""

    events: Path
    """``events.jsonl`` of the run, which names the address."""
    began: float | None = None
    """When the first window began, as ``time.time()``."""
    scrapes: list[float] = field(default_factory=list)
    """When scrapes were answered."""
    seconds: list[float] = field(default_factory=list)
    """How long each took."""

    def __call__(self) -> None:
        """Scrape, or not."""
        address = next((row["address"] for row in read_lines(self.events) if row["event"] == "metrics"), None)
        if address is None:
            return
        now = time.time()
        self.began = now if self.began is None else self.began
        if int((now - self.began) / WINDOW_S) % 2 == 0:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://{address}/metrics", timeout=2.0) as answer,
            ):
                answer.read()
                self.scrapes.append(now)
                self.seconds.append(time.time() - now)


def compared(steps: Sequence[Step], scraper: Scraper, warm_up: int) -> dict[str, Any]:
    """Median time between steps in each window; each window with scrapes beside the mean of its two neighbours.

    Args:
        steps: of the run, in order.
        scraper: that scraped it.
        warm_up: first steps that are left out.

    Raises:
        ValueError: there are too few windows with steps.
    """
    if scraper.began is None:
        raise ValueError("the run served no metrics")
    windows: dict[int, list[float]] = {}
    for earlier, later in itertools.pairwise(steps[warm_up:]):
        first, last = (int((step.time - scraper.began) // WINDOW_S) for step in (earlier, later))
        if first == last:
            windows.setdefault(first, []).append(later.time - earlier.time)
    paces = {at: statistics.median(gaps) for at, gaps in windows.items() if len(gaps) >= LEAST_STEPS}
    scraped = {int((at - scraper.began) // WINDOW_S) for at in scraper.scrapes}
    ratios = [
        paces[at] / statistics.fmean((paces[at - 1], paces[at + 1]))
        for at in sorted(scraped)
        if {at - 1, at, at + 1} <= paces.keys()
    ]
    if not ratios:
        raise ValueError(f"only {len(paces)} windows of {WINDOW_S:g} s with steps; take more steps")
    return {
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "windows": len(ratios),
        "scrapes": len(scraper.scrapes),
        "scrape_seconds": statistics.median(scraper.seconds),
        "step_seconds_scraped": statistics.median(paces[at] for at in scraped & paces.keys()),
        "step_seconds_alone": statistics.median(pace for at, pace in paces.items() if at not in scraped),
    }


def run_scraped(work: Work, limit_s: float, warm_up: int, logs: Path | None) -> dict[str, Any]:
    """A run whose metrics are scraped now and then, for ``limit_s`` or all of its steps."""
    row: dict[str, Any] = {"contender": SCRAPED, "load": load()}
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{SCRAPED}.txt" if logs is not None else None
    scrapers: list[Scraper] = []

    def watch(work: Work) -> bool:
        if not scrapers:
            scrapers.append(Scraper(run_dir(work) / "events.jsonl"))
        scrapers[0]()
        return False

    work = replace(work, steps=ENDLESS)
    with carried_out("planaria_job", work, limit_s, watch, log) as (done, ending):
        rows = read_lines(run_dir(done) / "metrics.jsonl")
        steps = [Step(found["step"] + 1, found["time"], str(found["gen"])) for found in rows]
        try:
            if not scrapers:
                raise ValueError("it ended at once")
            return row | compared(steps, scrapers[0], warm_up)
        except ValueError as error:
            return row | {"absent": f"{error}; {ending or 'exit code 0'}"}


def table_of_scrapes(rows: Sequence[dict[str, Any]]) -> report.Table:
    """What a run whose metrics were scraped shows."""
    columns = {
        "ratio": "ratio",
        "lowest": "lowest",
        "highest": "highest",
        "windows": "windows",
        "scrapes": "scrapes",
        "s per scrape": "scrape_seconds",
        "s per step, scraped": "step_seconds_scraped",
        "s per step, alone": "step_seconds_alone",
    }
    found = [row for row in rows if "ratio" in row]
    return report.Table(
        "Metrics", tuple(columns), [[report.number(row[key]) for key in columns.values()] for row in found]
    )
