"""The dashboards: the files are what the code builds, Grafana can read them, and they ask for what there is."""

from __future__ import annotations

import itertools
import json

import pytest
from grafana_foundation_sdk.models import dashboard as model
from tests.dashboards import queries

from planaria.dashboards import promql
from planaria.dashboards.board import COLUMNS, Board, Row
from planaria.dashboards.boards import BOARDS, file_name
from planaria.dashboards.panels import Kind, Panel, Query
from planaria.dashboards.write import as_json, encode, grid
from planaria.metrics.catalogue import CATALOGUE, RUN
from planaria.metrics.catalogue import Kind as MetricKind

FILES = queries.FOLDER / "grafana" / "dashboards"
EVENT_FIELDS = {"titleFormat", "textFormat", "step"}
"""Of annotations: Prometheus's own, which the SDK's model does not hold."""
TARGET = {"cluster", "instance", "job"}
"""Labels that Prometheus adds to all that it scrapes."""
board_of = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)


@board_of
def test_the_file_is_what_the_code_builds(board):
    assert (FILES / file_name(board)).read_text(encoding="utf-8") == as_json(board), "make dashboards"


def test_no_file_is_left_of_a_dashboard_that_is_no_more():
    assert {path.name for path in FILES.glob("*.json")} == {file_name(board) for board in BOARDS}


@board_of
def test_the_model_of_grafana_holds_every_field(board):
    """A field that is misspelt, or has the wrong type, is lost on the way through the model."""
    made = json.loads(as_json(board))
    for mark in made["annotations"]["list"]:
        for name in EVENT_FIELDS:
            del mark[name]
    assert json.loads(encode(model.Dashboard.from_json(made))) == made


@board_of
def test_panels_lie_on_the_grid_and_on_nothing_else(board):
    made = json.loads(as_json(board))
    taken: dict[tuple[int, int], str] = {}
    for panel in made["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= COLUMNS
        for cell in itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])):
            assert cell not in taken, f"{panel['title']} lies on {taken[cell]}"
            taken[cell] = panel["title"]
    identifiers = [panel["id"] for panel in made["panels"]]
    assert len(set(identifiers)) == len(identifiers)


@board_of
def test_panels_are_explained_and_links_lead_somewhere(board):
    uids = {other.uid for other in BOARDS}
    for what, _ in board.places():
        if isinstance(what, Panel):
            assert what.about.endswith(".") and what.title, what.title
            assert what.link is None or (what.link in uids and what.link != board.uid), what.title


def test_a_panel_wider_than_the_grid_is_refused():
    wide = Panel(Kind.LINES, "Wide", "Too wide.", [Query("up")], width=25)
    with pytest.raises(ValueError, match="'Wide' is 25 of 24 columns"):
        list(Board("x", "X", "x", [Row("Row", [wide])]).places())


def test_the_drawing_shows_every_panel():
    drawn = grid(BOARDS[1], cell=12)
    assert all(what.title in drawn for what, _ in BOARDS[1].places())


# -- queries ---------------------------------------------------------------------------------------


def _series() -> dict[str, set[str]]:
    """Labels of everything that can be asked for, by name."""
    known = {"up": set(), "ALERTS": {"alertname", "alertstate", "severity"}}
    for name, metric in CATALOGUE.items():
        labels = {RUN, *metric.labels}
        if metric.kind is MetricKind.HISTOGRAM:
            known |= {f"{name}_bucket": labels | {"le"}, f"{name}_sum": labels, f"{name}_count": labels}
        else:
            known[name] = labels
    every = set().union(*known.values())
    return known | {rule["record"]: every for rule in queries.rules() if "record" in rule}


def test_queries_read_only_what_there_is():
    known = _series()
    for query in queries.everything():
        for name, labels in queries.selectors(query.expr):
            assert name in known, f"{query.place}: there is no metric {name}"
            assert set(labels) <= known[name] | TARGET, f"{query.place}: {name} has no such label"
            for label, value in labels.items():
                values = dict(CATALOGUE[name].values).get(label) if name in CATALOGUE else None
                if values and value != ".*":
                    assert set(value.split("|")) <= set(values), f"{query.place}: {label} is never {value}"


def test_queries_group_only_by_labels_that_there_are():
    known = _series()
    for query in queries.everything():
        labels = set().union(*(known[name] for name, _ in queries.selectors(query.expr))) | TARGET | {RUN}
        assert queries.grouped(query.expr) <= labels, query.place


def test_every_metric_is_shown_somewhere():
    shown = {name for board in BOARDS for query in queries.of_board(board) for name, _ in queries.selectors(query.expr)}
    missing = [
        name
        for name, metric in CATALOGUE.items()
        if not shown & ({f"{name}_bucket", f"{name}_sum"} if metric.kind is MetricKind.HISTOGRAM else {name})
    ]
    assert not missing


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (lambda: promql.series("lost"), "planaria_lost"),
        (lambda: promql.series("loss", phase="whole"), "no label 'phase'"),
        (lambda: promql.series("workers", state="idle|training"), "never 'idle'"),
        (lambda: promql.rate("loss"), "is a gauge, and not a counter"),
        (lambda: promql.rate("step_seconds"), "is a histogram, and not a counter"),
        (lambda: promql.quantile(0.5, "steps_total"), "only a histogram has buckets"),
    ],
)
def test_a_query_for_what_is_not_there_cannot_be_written(write, says):
    with pytest.raises((KeyError, ValueError), match=says):
        write()
