"""One run: how much would a loss of everything cost, and what does safety cost."""

from __future__ import annotations

from planaria.dashboards.board import Board, Row
from planaria.dashboards.panels import BAD, WARN, Kind, Panel, Query
from planaria.dashboards.promql import buckets, increase, mean, quantile, rate, series
from planaria.dashboards.shared import CHECKPOINTS, FAULTS

BEHIND = f"{series('step')} - {series('checkpoint_step')}"

BOARD = Board(
    uid="planaria-checkpoints",
    title="Planaria / Checkpoints",
    about="One run: what a loss of everything would cost, and what safety costs.",
    marks=[FAULTS, CHECKPOINTS],
    with_node=True,
    rows=[
        Row(
            "Now",
            [
                Panel(
                    Kind.NUMBER,
                    "Age of the newest checkpoint",
                    "What would be lost if all machines went at once.",
                    [Query(series("checkpoint_age_seconds"))],
                    width=6,
                    unit="s",
                    steps=[(1800, WARN), (3600, BAD)],
                ),
                Panel(
                    Kind.NUMBER,
                    "Steps not yet durable",
                    "In memory on several nodes, but not in storage.",
                    [Query(BEHIND)],
                    width=6,
                    decimals=0,
                    empty="no checkpoint yet",
                ),
                Panel(
                    Kind.NUMBER,
                    "Steps not yet in memory",
                    "What the loss of one node would cost.",
                    [Query(f"{series('step')} - {series('snapshot_step')}")],
                    width=6,
                    steps=[(2, WARN), (20, BAD)],
                    decimals=0,
                    empty="no snapshots",
                ),
                Panel(
                    Kind.NUMBER,
                    "Failed",
                    "Checkpoints and snapshots, within the time shown.",
                    [
                        Query(f"sum({increase('checkpoint_failures_total')})", "checkpoints"),
                        Query(f"sum({increase('snapshot_failures_total')})", "snapshots"),
                    ],
                    width=6,
                    steps=[(1, BAD)],
                    decimals=0,
                    empty="none",
                ),
            ],
            height=4,
        ),
        Row(
            "Durable",
            [
                Panel(
                    Kind.LINES,
                    "Age of the newest checkpoint",
                    "A saw: it falls whenever one is durable. A tooth that grows and grows is a failing store.",
                    [Query(series("checkpoint_age_seconds"), "age")],
                    width=12,
                    unit="s",
                    steps=[(1800, WARN)],
                    low=0,
                ),
                Panel(
                    Kind.LINES,
                    "Steps",
                    "Done, held in memory, and durable.",
                    [
                        Query(series("step"), "done"),
                        Query(series("snapshot_step"), "in memory"),
                        Query(series("checkpoint_step"), "durable"),
                    ],
                    width=12,
                    low=0,
                ),
                Panel(
                    Kind.LINES,
                    "Time to durable",
                    "From the snapshot to the durable checkpoint. Training goes on meanwhile.",
                    [
                        Query(mean("checkpoint_seconds", "$__range"), "mean"),
                        Query(quantile(0.99, "checkpoint_seconds", "$__range"), "99 %"),
                    ],
                    unit="s",
                    low=0,
                    empty="no checkpoint in this time",
                ),
                Panel(
                    Kind.HEAT,
                    "Times to durable",
                    "How many checkpoints took how long.",
                    [Query(buckets("checkpoint_seconds"), "{{le}}")],
                    unit="s",
                ),
                Panel(
                    Kind.LINES,
                    "Checkpoints",
                    "Within five minutes. Skipped: the one before was still being written; the store is too slow "
                    "for the interval.",
                    [
                        Query(increase("checkpoints_total", "5m"), "durable"),
                        Query(increase("checkpoints_skipped_total", "5m"), "skipped"),
                        Query(increase("checkpoint_failures_total", "5m"), "failed"),
                    ],
                    width=12,
                    low=0,
                ),
                Panel(
                    Kind.LINES,
                    "Bytes made durable",
                    "Per second, over five minutes.",
                    [Query(rate("checkpoint_bytes_total", "5m"), "bytes")],
                    width=12,
                    unit="Bps",
                    low=0,
                ),
            ],
        ),
        Row(
            "In memory",
            [
                Panel(
                    Kind.LINES,
                    "Training stands still",
                    "For a snapshot or a checkpoint, on rank 0: the price of safety per step.",
                    [
                        Query(mean("snapshot_seconds"), "mean"),
                        Query(quantile(0.99, "snapshot_seconds"), "99 %"),
                    ],
                    unit="s",
                    low=0,
                ),
                Panel(
                    Kind.LINES,
                    "Shared memory in use",
                    "For snapshots and copies of other nodes, by node.",
                    [Query(series("snapshot_bytes", node="$node"), "{{node}}")],
                    unit="bytes",
                    low=0,
                ),
                Panel(
                    Kind.LINES,
                    "Troubles",
                    "Within five minutes. Unreplicated: on one node only. Memory short: enlarge shared memory.",
                    [Query(increase("snapshot_failures_total", "5m"), "{{reason}}")],
                    low=0,
                    empty="none",
                ),
            ],
        ),
    ],
)
