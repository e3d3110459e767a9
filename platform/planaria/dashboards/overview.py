"""All runs at a glance: which of them need somebody."""

from __future__ import annotations

from planaria.dashboards.board import Board, Row
from planaria.dashboards.panels import BAD, GOOD, WARN, Kind, Panel, Query
from planaria.dashboards.promql import increase, rate, series
from planaria.dashboards.shared import FAULTS, SINCE_STEP, STATE, STATE_NAMES, STATE_OVER_TIME

NOW = [
    Panel(
        Kind.NUMBER,
        "Alerts",
        "Firing now. See the runbook: every alert links to its chapter.",
        [Query('count(ALERTS{alertname=~"Planaria.*",alertstate="firing"}) or vector(0)')],
        width=4,
        steps=[(1, BAD)],
    ),
    Panel(
        Kind.NUMBER,
        "Active runs",
        "Neither finished, stopped nor failed.",
        [Query(f"sum({series('run_active')})")],
        width=4,
        floor="blue",
    ),
    Panel(
        Kind.NUMBER,
        "Lowest goodput",
        "Of all chosen runs that are active: the share of wall time in steps that count.",
        [Query(f"min({series('goodput_ratio')} and {series('run_active')} == 1)")],
        width=4,
        unit="percentunit",
        floor=BAD,
        steps=[(0.7, WARN), (0.9, GOOD)],
        decimals=1,
        empty="no active run",
    ),
    Panel(
        Kind.NUMBER,
        "Workers in training",
        "Over all chosen runs.",
        [Query(f"sum({series('workers', state='training')})")],
        width=4,
        floor="blue",
        link="planaria-recovery",
    ),
    Panel(
        Kind.NUMBER,
        "Workers missing",
        "Up to what the jobs would use. They go on without; more of them would be faster.",
        [
            Query(
                f"sum(clamp_min({series('workers_wanted')} - on (run) "
                f"sum by (run) ({series('workers', state='training|spare')}), 0))"
            )
        ],
        width=4,
        steps=[(1, WARN)],
    ),
    Panel(
        Kind.NUMBER,
        "Nodes in quarantine",
        "They failed repeatedly, hung the others or computed wrong numbers, and get no work for a while.",
        [Query(f"sum({series('nodes', state='quarantined')})")],
        width=4,
        steps=[(1, WARN)],
        link="planaria-recovery",
    ),
]
RUNS = Panel(
    Kind.TABLE,
    "Runs",
    "One line per run, as of now. The name leads to the run's training dashboard.",
    [
        Query(STATE, "State", states=STATE_NAMES),
        Query(f"max by (run) ({series('step')})", "Step"),
        Query(f"max by (run) ({series('steps_planned')})", "Planned"),
        Query(f"max by (run) ({series('loss')})", "Loss"),
        Query(f"max by (run) ({series('tokens_per_second')})", "Tokens/s"),
        Query(f"max by (run) ({series('goodput_ratio')})", "Goodput", unit="percentunit"),
        Query(f"sum by (run) ({series('workers', state='training')})", "Workers"),
        Query(f"sum by (run) ({increase('faults_total', '1h')})", "Faults in 1 h"),
        Query(f"max by (run) ({series('checkpoint_age_seconds')})", "Checkpoint age", unit="s"),
    ],
    width=24,
)

BOARD = Board(
    uid="planaria-overview",
    title="Planaria / Fleet",
    about="All runs: what needs somebody, and where to look next.",
    one_run=False,
    marks=[FAULTS],
    rows=[
        Row("Does anything need me?", NOW, height=4),
        Row("Runs", [RUNS], height=8),
        Row("What they are doing", [STATE_OVER_TIME], height=6),
        Row(
            "Speed and loss of time",
            [
                Panel(
                    Kind.LINES,
                    "Tokens per second",
                    "Input tokens without padding, over the last steps. It falls with the number of workers.",
                    [Query(series("tokens_per_second"), "{{run}}")],
                    low=0,
                ),
                Panel(
                    Kind.LINES,
                    "Goodput",
                    "Share of the wall time since the job began in steps that count.",
                    [Query(series("goodput_ratio"), "{{run}}")],
                    unit="percentunit",
                    floor=BAD,
                    steps=[(0.7, WARN), (0.9, GOOD)],
                    low=0,
                    high=1,
                    link="planaria-efficiency",
                ),
                Panel(
                    Kind.LINES,
                    "Steps per second",
                    "Executed steps, those done again included.",
                    [Query(rate("steps_total"), "{{run}}")],
                    low=0,
                ),
            ],
        ),
        Row(
            "Faults",
            [
                Panel(
                    Kind.LINES,
                    "Workers in training",
                    "A drop is a loss or a planned change; it should come back when machines do.",
                    [Query(f"sum by (run) ({series('workers', state='training')})", "{{run}}")],
                    low=0,
                    decimals=0,
                    link="planaria-recovery",
                ),
                Panel(
                    Kind.LINES,
                    "Faults in the last hour",
                    "Generations that a fault ended. Three in an hour raise an alert.",
                    [Query(increase("faults_total", "1h"), "{{run}}")],
                    steps=[(3, BAD)],
                    low=0,
                    link="planaria-recovery",
                ),
                Panel(
                    Kind.LINES,
                    SINCE_STEP.title,
                    SINCE_STEP.about,
                    [Query(SINCE_STEP.queries[0].expr, "{{run}}")],
                    unit="s",
                    steps=SINCE_STEP.steps,
                    low=0,
                ),
            ],
        ),
    ],
)
