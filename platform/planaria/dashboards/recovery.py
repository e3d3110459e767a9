"""One run: what went wrong, how long it took to go on, and what was lost."""

from __future__ import annotations

from planaria.dashboards.board import Board, Row
from planaria.dashboards.panels import BAD, WARN, Kind, Panel, Query
from planaria.dashboards.promql import buckets, increase, mean, quantile, series
from planaria.dashboards.shared import CHANGES, FAULTS, STATE_NOW, STATE_OVER_TIME

PARTS = "detect|abort|plan|form|build|restore|first_step"
"""Phases of a recovery, without the whole."""


def _count(title: str, about: str, name: str, legend: str = "", steps: tuple[tuple[float, str], ...] = ()) -> Panel:
    """How much a counter grew within the time shown."""
    by = "sum by (run)" if not legend else f"sum by ({legend.strip('{}')})"
    return Panel(
        Kind.BARS if legend else Kind.NUMBER,
        title,
        about,
        [Query(f"{by} ({increase(name)})", legend)],
        width=4,
        steps=steps,
        decimals=0,
        low=0,
        empty="none",
    )


NOW = [
    STATE_NOW,
    _count("Faults", "Within the time shown.", "faults_total", steps=((1, WARN), (3, BAD))),
    Panel(
        Kind.NUMBER,
        "Typical recovery",
        "Mean of those within the time shown: from the evidence of a fault to the end of the next step.",
        [Query(mean("recovery_seconds", "$__range", phase="whole"))],
        width=4,
        unit="s",
        steps=[(10, WARN), (60, BAD)],
        empty="no recovery",
    ),
    Panel(
        Kind.NUMBER,
        "Longest recovery, at most",
        "The upper end of the histogram's bucket that the longest one fell into.",
        [Query(quantile(1, "recovery_seconds", "$__range", phase="whole"))],
        width=4,
        unit="s",
        steps=[(30, WARN), (120, BAD)],
        empty="no recovery",
    ),
    _count(
        "Steps done again",
        "Undone by rollbacks within the time shown. None where memory held the state.",
        "steps_undone_total",
        steps=((1, WARN), (20, BAD)),
    ),
    Panel(
        Kind.NUMBER,
        "Generation",
        "One membership on one layout: every fault and planned change begins a new one.",
        [Query(series("generation"))],
        width=4,
        floor="blue",
        decimals=0,
    ),
]
TIMELINE = [
    STATE_OVER_TIME,
    Panel(
        Kind.STACK,
        "Workers",
        "By what they do. Red marks are faults, blue ones planned changes.",
        [Query(series("workers"), "{{state}}")],
        width=12,
        low=0,
        decimals=0,
    ),
    Panel(
        Kind.LINES,
        "Training and wanted",
        "The gap is what the job would use and the cluster does not give.",
        [
            Query(series("workers", state="training"), "training"),
            Query(series("workers_wanted"), "wanted"),
        ],
        width=12,
        low=0,
        decimals=0,
    ),
]
TIMES = [
    Panel(
        Kind.BARS,
        "Where recoveries spend their time",
        "Mean per phase, within the time shown. Long restore: state came from storage. Long form: a slow start.",
        [Query(mean("recovery_seconds", "$__range", "phase", phase=PARTS), "{{phase}}")],
        unit="s",
        low=0,
        empty="no recovery",
    ),
    Panel(
        Kind.HEAT,
        "Recovery times",
        "How many recoveries took how long.",
        [Query(buckets("recovery_seconds", phase="whole"), "{{le}}")],
        unit="s",
    ),
    Panel(
        Kind.LINES,
        "Recoveries and planned changes",
        "Mean time of those within five minutes. A planned change should take less than a recovery.",
        [
            Query(mean("recovery_seconds", "5m", phase="whole"), "recovery"),
            Query(mean("resize_seconds", "5m"), "planned change"),
        ],
        unit="s",
        low=0,
        empty="none in this time",
    ),
]
CAUSES = [
    _count("Recoveries by cause", "Within the time shown.", "recoveries_total", "{{cause}}").sized(6),
    _count("Processes lost", "By kind, within the time shown.", "processes_lost_total", "{{kind}}").sized(6),
    _count("Planned changes", "By cause, within the time shown.", "resizes_total", "{{cause}}").sized(6),
    Panel(
        Kind.LINES,
        "Nodes",
        "With places for workers. Leaving: under notice. Quarantined: no work for a while.",
        [Query(series("nodes"), "{{state}}")],
        width=6,
        low=0,
        decimals=0,
    ),
]
JUDGED = [
    _count("Hangs", "Nobody got ahead; whoever was furthest behind was removed.", "hangs_total", steps=((1, WARN),)),
    _count("Stragglers", "Ranks found slower, window after window.", "stragglers_total", steps=((1, WARN),)),
    _count("Quarantines", "Nodes that were put aside.", "quarantines_total", steps=((1, WARN),)),
    _count(
        "Replicas that differ",
        "Comparisons between replicas that must be equal. Suspect the memory of a machine.",
        "replica_mismatches_total",
        steps=((1, BAD),),
    ),
    _count("Controller returned", "It was lost and started again.", "controller_returns_total", steps=((1, WARN),)),
]
LAYOUT = [
    Panel(
        Kind.STATES,
        "Layout",
        "The planner's choice for the workers of the moment.",
        [Query(f"max by (layout) ({series('layout_info')})", "{{layout}}")],
        width=12,
        states=[(1.0, "in use", "blue")],
    ),
    Panel(
        Kind.LINES,
        "Degrees",
        "Of the newest layout; their product is the number of ranks.",
        [Query(series("layout_degree"), "{{axis}}")],
        width=12,
        low=0,
        decimals=0,
    ),
]

BOARD = Board(
    uid="planaria-recovery",
    title="Planaria / Recovery",
    about="One run: what went wrong, how long it took to go on, and what was lost.",
    marks=[FAULTS, CHANGES],
    rows=[
        Row("Now", NOW, height=4),
        Row("What happened when", TIMELINE, height=7),
        Row("How long it took", TIMES),
        Row("Why", CAUSES),
        Row("Judgements", [panel.sized(4) for panel in JUDGED], height=4),
        Row("Layout", LAYOUT),
    ],
)
