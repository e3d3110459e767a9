"""One run: do batches come in time, and are the samples sound."""

from __future__ import annotations

from planaria.dashboards.board import Board, Row
from planaria.dashboards.panels import BAD, WARN, Kind, Panel, Query
from planaria.dashboards.promql import increase, mean, rate, series
from planaria.dashboards.shared import CHANGES, FAULTS

WAIT = f"{rate('step_seconds:sum', phase='data')} / ignoring (phase) ({rate('step_seconds:sum', phase='whole')} > 0)"
BAD_SHARE = f"sum by (run) ({increase('bad_samples_total')}) / sum by (run) ({increase('samples_total')} > 0)"

BOARD = Board(
    uid="planaria-data",
    title="Planaria / Data",
    about="One run: do batches come in time, and are the samples sound.",
    marks=[FAULTS, CHANGES],
    with_node=True,
    rows=[
        Row(
            "Now",
            [
                Panel(
                    Kind.NUMBER,
                    "Data wait",
                    "Share of a step that rank 0 waits for its batch.",
                    [Query(WAIT)],
                    width=6,
                    unit="percentunit",
                    steps=[(0.05, WARN), (0.1, BAD)],
                    decimals=1,
                    empty="no steps now",
                ),
                Panel(
                    Kind.NUMBER,
                    "Loaders",
                    "That answer. With none of them every rank builds its own share, which is slower.",
                    [Query(series("loaders"))],
                    width=6,
                    floor=BAD,
                    steps=[(1, "green")],
                    decimals=0,
                ),
                Panel(
                    Kind.NUMBER,
                    "Shortest queue",
                    "Batches that were ready before they were needed, on the rank that had the fewest.",
                    [Query(f"min by (run) ({series('rank_loader_queue')})")],
                    width=6,
                    floor=WARN,
                    steps=[(1, "green")],
                    decimals=0,
                ),
                Panel(
                    Kind.NUMBER,
                    "Bad samples",
                    "Share of the samples within the time shown that were damaged and replaced.",
                    [Query(BAD_SHARE)],
                    width=6,
                    unit="percentunit",
                    steps=[(0.001, WARN), (0.01, BAD)],
                    decimals=3,
                    empty="none",
                ),
            ],
            height=4,
        ),
        Row(
            "Do batches come in time?",
            [
                Panel(
                    Kind.LINES,
                    "Data wait",
                    "Share of a step. More than a tenth: more loaders, or faster storage.",
                    [Query(WAIT, "rank 0")],
                    width=12,
                    unit="percentunit",
                    steps=[(0.1, BAD)],
                    low=0,
                    empty="no steps now",
                ),
                Panel(
                    Kind.LINES,
                    "Wait by rank",
                    "For the batch of the newest step. One rank alone: its node is slow or far from the loaders.",
                    [Query(series("rank_data_wait_seconds", node="$node"), "{{rank}} on {{node}}")],
                    width=12,
                    unit="s",
                    low=0,
                ),
                Panel(
                    Kind.LINES,
                    "Batches ready",
                    "Before they were needed, by rank. Zero for long: the loaders cannot keep up.",
                    [Query(series("rank_loader_queue", node="$node"), "{{rank}} on {{node}}")],
                    width=12,
                    low=0,
                    decimals=0,
                ),
                Panel(
                    Kind.LINES,
                    "Wait per step",
                    "Mean on rank 0, beside the time of the whole step.",
                    [
                        Query(mean("step_seconds", "$__rate_interval", phase="data"), "wait"),
                        Query(mean("step_seconds", "$__rate_interval", phase="whole"), "step"),
                    ],
                    width=12,
                    unit="s",
                    low=0,
                ),
            ],
        ),
        Row(
            "Are the samples sound?",
            [
                Panel(
                    Kind.LINES,
                    "Bad samples",
                    "Per minute, by reason. Each was replaced by another one, the same on every attempt.",
                    [Query(f"60 * sum by (reason) ({rate('bad_samples_total')})", "{{reason}}")],
                    low=0,
                    empty="none",
                ),
                Panel(
                    Kind.BARS,
                    "Bad samples by reason",
                    "Within the time shown.",
                    [Query(f"sum by (reason) ({increase('bad_samples_total')})", "{{reason}}")],
                    low=0,
                    decimals=0,
                    empty="none",
                ),
                Panel(
                    Kind.LINES,
                    "Targets among tokens",
                    "Share of the input tokens that the loss is taken over. A change means other data.",
                    [Query(f"{rate('target_tokens_total')} / ({rate('tokens_total')} > 0)", "share")],
                    unit="percentunit",
                    low=0,
                ),
            ],
        ),
        Row(
            "How much?",
            [
                Panel(
                    Kind.LINES,
                    "Samples per second",
                    "Of wall time, over all ranks.",
                    [Query(rate("samples_total"), "samples")],
                    low=0,
                ),
                Panel(
                    Kind.LINES,
                    "Tokens per sample",
                    "Input tokens without padding. Longer samples make longer steps.",
                    [Query(f"{rate('tokens_total')} / ({rate('samples_total')} > 0)", "tokens")],
                    low=0,
                ),
                Panel(
                    Kind.LINES,
                    "Loaders",
                    "That answer. When one is lost, what was asked of it is asked of another one.",
                    [Query(series("loaders"), "loaders")],
                    low=0,
                    decimals=0,
                ),
            ],
        ),
    ],
)
