"""One run: where the time, the bytes and the energy go."""

from __future__ import annotations

from dataclasses import replace

from planaria.dashboards.board import Board, Row
from planaria.dashboards.panels import Kind, Panel, Query
from planaria.dashboards.promql import rate, series
from planaria.dashboards.shared import CHANGES, FAULTS, GOODPUT

CLASSES = series("goodput_seconds")
PRODUCTIVE = series("goodput_seconds", **{"class": "productive"})
REST = series("goodput_seconds").replace("}", ',class!="productive"}')
AGE = f"{series('scrape_timestamp_seconds')} - {series('start_timestamp_seconds')}"
POWER = f"sum by (run) ({rate('node_energy_joules_total')})"
NO_METER = "no node has a meter"

BOARD = Board(
    uid="planaria-efficiency",
    title="Planaria / Efficiency and energy",
    about="One run: where the time, the bytes and the energy go.",
    marks=[FAULTS, CHANGES],
    with_node=True,
    rows=[
        Row(
            "Now",
            [
                replace(GOODPUT, link=None),
                Panel(
                    Kind.NUMBER,
                    "Age",
                    "Since the job began.",
                    [Query(AGE)],
                    width=4,
                    unit="s",
                    floor="blue",
                ),
                Panel(
                    Kind.NUMBER,
                    "Not productive",
                    "Wall time that did not go into steps that count.",
                    [Query(f"sum by (run) ({CLASSES}) - on (run) {PRODUCTIVE}")],
                    width=4,
                    unit="s",
                    floor="text",
                ),
                Panel(
                    Kind.NUMBER,
                    "Tokens per second and worker",
                    "Falls when a layout suits its workers badly.",
                    [
                        Query(
                            f"{series('tokens_per_second')} / on (run) "
                            f"(sum by (run) ({series('workers', state='training')}) > 0)"
                        )
                    ],
                    width=4,
                    floor="blue",
                ),
                Panel(
                    Kind.NUMBER,
                    "Power",
                    "Of the nodes that have meters: whole processor packages and GPUs, other jobs on them included.",
                    [Query(POWER)],
                    width=4,
                    unit="watt",
                    floor="blue",
                    empty=NO_METER,
                ),
                Panel(
                    Kind.NUMBER,
                    "Energy per token",
                    "Of what the meters show.",
                    [Query(f"{POWER} / on (run) ({rate('tokens_total')} > 0)")],
                    width=4,
                    unit="joule",
                    floor="blue",
                    empty=NO_METER,
                ),
            ],
            height=4,
        ),
        Row(
            "Where does the time go?",
            [
                Panel(
                    Kind.STACK,
                    "Wall time by class",
                    "The classes add up to the age of the job. Anything but productive that grows is worth a look.",
                    [Query(CLASSES, "{{class}}")],
                    width=12,
                    unit="s",
                    low=0,
                ),
                Panel(
                    Kind.STACK,
                    "Of the last five minutes",
                    "Share of each class. Negative for a moment after a rollback, which moves time to lost.",
                    [
                        Query(
                            f"delta({CLASSES}[5m]) / on (run) group_left () (sum by (run) (delta({CLASSES}[5m])) > 0)",
                            "{{class}}",
                        )
                    ],
                    width=12,
                    unit="percentunit",
                ),
                Panel(
                    Kind.BARS,
                    "Time that was not productive",
                    "Since the job began, by class: the longest bar is what to mend first.",
                    [Query(f"sort_desc({REST} > 0)", "{{class}}")],
                    width=12,
                    unit="s",
                    low=0,
                    empty="none",
                ),
                Panel(
                    Kind.LINES,
                    "Goodput",
                    "Since the job began.",
                    [Query(series("goodput_ratio"), "goodput")],
                    width=12,
                    unit="percentunit",
                    floor="red",
                    steps=[(0.7, "orange"), (0.9, "green")],
                    low=0,
                    high=1,
                ),
            ],
        ),
        Row(
            "Bytes",
            [
                Panel(
                    Kind.LINES,
                    "On the wire",
                    "Payload of sums of gradients that rank 0 sends to its replicas.",
                    [Query(rate("wire_bytes_total"), "bytes")],
                    unit="Bps",
                    low=0,
                ),
                Panel(
                    Kind.LINES,
                    "On the wire per step",
                    "Changes with the layout, and with compression.",
                    [Query(f"{rate('wire_bytes_total')} / ({rate('steps_total')} > 0)", "bytes")],
                    unit="bytes",
                    low=0,
                ),
                Panel(
                    Kind.LINES,
                    "Memory",
                    "Of all ranks together, by kind.",
                    [Query(f"sum by (kind) ({series('rank_memory_bytes', node='$node')})", "{{kind}}")],
                    unit="bytes",
                    low=0,
                ),
            ],
        ),
        Row(
            "Energy",
            [
                Panel(
                    Kind.STACK,
                    "Power by node and meter",
                    "Only meters that the nodes have. Package: processors. Device: GPUs.",
                    [Query(rate("node_energy_joules_total", node="$node"), "{{node}} {{meter}}")],
                    width=12,
                    unit="watt",
                    low=0,
                    empty=NO_METER,
                ),
                Panel(
                    Kind.LINES,
                    "Energy per token",
                    "Rises in recoveries and while workers wait.",
                    [Query(f"{POWER} / on (run) ({rate('tokens_total')} > 0)", "per token")],
                    width=12,
                    unit="joule",
                    low=0,
                    empty=NO_METER,
                ),
            ],
        ),
    ],
)
