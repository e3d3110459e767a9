"""Panels and marks that several dashboards have. Pure."""

from __future__ import annotations

from planaria.dashboards.board import Marks
from planaria.dashboards.panels import BAD, GOOD, WARN, Kind, Panel, Query
from planaria.dashboards.promql import CHOSEN, series
from planaria.metrics.catalogue import STATES

_COLORS = {
    "running": GOOD,
    "finished": "blue",
    "stopped": "text",
    "failed": BAD,
    "recovering": WARN,
    "waiting": "yellow",
}
STATE = "max by (run) ({})".format(
    # Each state is a series of its own, 1 or 0; Grafana colours a number, so the states are counted through.
    " or ".join(f"{number} * ({series('state', state=state)} == 1)" for number, state in enumerate(STATES, start=1))
)
STATE_NAMES = [(float(number), state, _COLORS.get(state, "purple")) for number, state in enumerate(STATES, start=1)]

STATE_NOW = Panel(
    Kind.NUMBER,
    "State",
    "What the controller is doing. Anything but running, finished or stopped for long deserves a look.",
    [Query(STATE)],
    width=4,
    states=STATE_NAMES,
)
STATE_OVER_TIME = Panel(
    Kind.STATES,
    "State over time",
    "States of the controller. Recoveries and planned changes are short bars between long stretches of running.",
    [Query(STATE, "{{run}}")],
    width=24,
    states=STATE_NAMES,
)
SINCE_STEP = Panel(
    Kind.NUMBER,
    "Since the last step",
    "By the controller's clock, so that the clock of the reader does not matter.",
    [Query(f"{series('scrape_timestamp_seconds')} - {series('last_step_timestamp_seconds')}")],
    width=4,
    unit="s",
    steps=[(60, WARN), (300, BAD)],
    empty="no step yet",
)
GOODPUT = Panel(
    Kind.NUMBER,
    "Goodput",
    "Share of the wall time since the job began that went into steps that count.",
    [Query(series("goodput_ratio"))],
    width=4,
    unit="percentunit",
    floor=BAD,
    steps=[(0.7, WARN), (0.9, GOOD)],
    low=0,
    high=1,
    decimals=1,
    link="planaria-efficiency",
)

# A value against the same one of a step of the annotation earlier: true at exactly one point after every change.
FAULTS = Marks(
    "Fault",
    f"planaria_faults_total{{{CHOSEN}}} - planaria_faults_total{{{CHOSEN}}} offset 15s > 0",
    BAD,
    "{{run}}: a generation ended by a fault",
)
CHANGES = Marks(
    "Planned change",
    f"sum by (run) (planaria_resizes_total{{{CHOSEN}}})"
    f" - sum by (run) (planaria_resizes_total{{{CHOSEN}}} offset 15s) > 0",
    "blue",
    "{{run}}: other workers or another layout",
)
CHECKPOINTS = Marks(
    "Checkpoint",
    f"planaria_checkpoints_total{{{CHOSEN}}} - planaria_checkpoints_total{{{CHOSEN}}} offset 15s > 0",
    GOOD,
    "{{run}}: a checkpoint is durable",
)
