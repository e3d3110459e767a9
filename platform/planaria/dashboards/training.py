"""One run: does it learn, how fast, and which rank holds the others up."""

from __future__ import annotations

from planaria.dashboards.board import Board, Row
from planaria.dashboards.panels import BAD, WARN, Kind, Panel, Query
from planaria.dashboards.promql import buckets, mean, quantile, rate, series
from planaria.dashboards.shared import CHANGES, FAULTS, GOODPUT, SINCE_STEP, STATE_NOW

PARTS = "data|agree|step|reduce|update|keep|checkpoint"
"""Phases of a step, without the whole."""
COMPUTE = series("rank_compute_seconds")

NOW = [
    STATE_NOW,
    Panel(
        Kind.NUMBER,
        "Progress",
        "Steps done in the state that counts, of those that the job is to do.",
        [Query(f"{series('step')} / {series('steps_planned')}")],
        width=4,
        unit="percentunit",
        floor="blue",
        decimals=1,
    ),
    Panel(
        Kind.NUMBER,
        "Loss",
        "Mean per target token of the newest step.",
        [Query(series("loss"))],
        width=4,
        floor="blue",
        decimals=4,
        empty="no step yet",
    ),
    SINCE_STEP,
    GOODPUT,
    Panel(
        Kind.NUMBER,
        "Time left",
        "Steps left, at the pace of the last ten minutes, faults included.",
        [Query(f"({series('steps_planned')} - {series('step')}) / (deriv({series('step')}[10m]) > 0)")],
        width=4,
        unit="s",
        floor="blue",
        empty="no pace yet",
    ),
]
LEARNS = [
    Panel(
        Kind.LINES,
        "Loss",
        "Mean per target token. It must not notice a fault: a jump at a mark is worth a bug report.",
        [Query(series("loss"), "loss")],
        width=12,
    ),
    Panel(
        Kind.LINES,
        "Gradient norm",
        "Before clipping. A slow rise over many steps often comes before numbers that are not finite.",
        [Query(series("gradient_norm"), "norm")],
        width=12,
        log=True,
    ),
    Panel(
        Kind.LINES,
        "Learning rate",
        "Of the newest step; a function of the step alone, so no fault bends it.",
        [Query(series("learning_rate"), "rate")],
        unit="sci",
        low=0,
    ),
    Panel(
        Kind.LINES,
        "Steps skipped",
        "Per minute, by reason. Overflows are usual with fp16 while the loss scale finds its height.",
        [Query(f"60 * {rate('skipped_steps_total')}", "{{reason}}")],
        low=0,
    ),
    Panel(
        Kind.LINES,
        "Loss scale",
        "Factor on the loss in fp16. Empty with other precisions.",
        [Query(series("loss_scale"), "scale")],
        log=True,
        empty="no loss scale: precision is not fp16",
    ),
]
SPEED = [
    Panel(
        Kind.LINES,
        "Step time",
        "Median and slowest hundredth on rank 0.",
        [
            Query(quantile(0.5, "step_seconds", phase="whole"), "median"),
            Query(quantile(0.99, "step_seconds", phase="whole"), "99 %"),
        ],
        unit="s",
        low=0,
    ),
    Panel(
        Kind.STACK,
        "Step time by phase",
        "Mean per step on rank 0; the phases add up to the step. Much data: see the data dashboard. "
        "Much agree or reduce: another rank is slower.",
        [Query(mean("step_seconds", "$__rate_interval", "phase", phase=PARTS), "{{phase}}")],
        unit="s",
        low=0,
        link="planaria-data",
    ),
    Panel(
        Kind.HEAT,
        "Step times",
        "How many steps took how long. Two bands: some steps do more, or a rank stutters.",
        [Query(buckets("step_seconds", phase="whole"), "{{le}}")],
        unit="s",
    ),
    Panel(
        Kind.LINES,
        "Tokens per second",
        "By the clock over the last steps, and consumed per second of wall time: the gap is time without steps.",
        [
            Query(series("tokens_per_second"), "while stepping"),
            Query(rate("tokens_total"), "wall time"),
            Query(rate("target_tokens_total"), "targets, wall time"),
        ],
        low=0,
    ),
    Panel(
        Kind.LINES,
        "Samples per second",
        "Of wall time, those of steps done again included.",
        [Query(rate("samples_total"), "samples")],
        low=0,
    ),
    Panel(
        Kind.LINES,
        "Steps executed and undone",
        "Per minute. What a rollback undid is done again.",
        [Query(f"60 * {rate('steps_total')}", "executed"), Query(f"60 * {rate('steps_undone_total')}", "undone")],
        low=0,
        link="planaria-recovery",
    ),
]
RANKS = [
    Panel(
        Kind.LINES,
        "Slowest rank over the median",
        "Time that a rank itself computes, waits for others left out. Above 1.3 for long: a straggler.",
        [Query(f"max by (run) ({COMPUTE}) / quantile by (run) (0.5, {COMPUTE})", "slowest / median")],
        steps=[(1.3, BAD)],
        low=1,
        empty="not measured on this engine",
    ),
    Panel(
        Kind.LINES,
        "Compute time by rank",
        "What each rank needs for a step without waiting for others.",
        [Query(series("rank_compute_seconds", node="$node"), "{{rank}} on {{node}}")],
        unit="s",
        low=0,
        empty="not measured on this engine",
    ),
    Panel(
        Kind.LINES,
        "Step time by rank",
        "Ranks wait for one another, so that these are nearly equal; who differs is cut off or late.",
        [Query(series("rank_step_seconds", node="$node"), "{{rank}} on {{node}}")],
        unit="s",
        low=0,
    ),
    Panel(
        Kind.BARS,
        "Steps behind the furthest rank",
        "Of now. More than one: that rank holds the others up.",
        [
            Query(
                f"scalar(max({series('rank_last_step')})) - {series('rank_last_step', node='$node')}",
                "{{rank}} on {{node}}",
            )
        ],
        steps=[(2, WARN), (5, BAD)],
        low=0,
        decimals=0,
    ),
    Panel(
        Kind.LINES,
        "Memory by rank",
        "Resident memory of the process, and memory allocated on its device.",
        [Query(series("rank_memory_bytes", node="$node"), "{{rank}} {{kind}}")],
        width=16,
        unit="bytes",
        low=0,
    ),
]

BOARD = Board(
    uid="planaria-training",
    title="Planaria / Training",
    about="One run: does it learn, how fast, and which rank holds the others up.",
    marks=[FAULTS, CHANGES],
    with_node=True,
    rows=[
        Row("Now", NOW, height=4),
        Row("Does it learn?", LEARNS),
        Row("How fast?", SPEED),
        Row("Which rank?", RANKS),
    ],
)
