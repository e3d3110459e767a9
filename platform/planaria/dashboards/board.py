"""A dashboard: rows of panels on Grafana's grid, and what all dashboards share. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard as model

from planaria.dashboards.panels import SOURCE, Panel, render

COLUMNS = 24
"""Width of Grafana's grid."""
TAG = "planaria"


@dataclass(frozen=True)
class Row:
    """Panels side by side under a heading; more than the grid is wide go on in the next line."""

    title: str
    panels: Sequence[Panel]
    height: int = 8
    """Height of a line of panels, in grid units of about 30 pixels."""


@dataclass(frozen=True)
class Marks:
    """Annotations: a vertical line wherever ``expr`` has a value."""

    name: str
    expr: str
    color: str
    text: str


@dataclass(frozen=True)
class Board:
    """One dashboard. ``one_run``: its numbers mean something for one run at a time only."""

    uid: str
    title: str
    about: str
    rows: Sequence[Row]
    marks: Sequence[Marks] = field(default=())
    one_run: bool = True
    with_node: bool = False

    def places(self) -> Iterator[tuple[Row | Panel, model.GridPos]]:
        """Headings and panels with their places, from the top left.

        Raises:
            ValueError: a panel is wider than the grid.
        """
        y = 0
        for row in self.rows:
            yield row, model.GridPos(h=1, w=COLUMNS, x=0, y=y)
            y, x = y + 1, 0
            for panel in row.panels:
                if not 0 < panel.width <= COLUMNS:
                    raise ValueError(f"{self.uid}: panel {panel.title!r} is {panel.width} of {COLUMNS} columns wide")
                if x + panel.width > COLUMNS:
                    x, y = 0, y + row.height
                yield panel, model.GridPos(h=row.height, w=panel.width, x=x, y=y)
                x += panel.width
            y += row.height


class _Event(model.AnnotationQuery):
    """The SDK's class knows the fields of all sources; these ones are Prometheus's own."""

    def __init__(self, marks: Marks) -> None:
        super().__init__(
            name=marks.name, datasource=SOURCE, enable=True, hide=False, icon_color=marks.color, expr=marks.expr
        )
        self.text = marks.text

    def to_json(self) -> dict[str, object]:
        return super().to_json() | {"titleFormat": self.name, "textFormat": self.text, "step": "15s"}


class _Mark(Builder[model.AnnotationQuery]):
    def __init__(self, marks: Marks) -> None:
        self._event = _Event(marks)

    def build(self) -> model.AnnotationQuery:
        return self._event


def build(board: Board) -> model.Dashboard:
    """Grafana's model of ``board``."""
    made = dashboard.Dashboard(board.title).uid(board.uid).description(board.about).tags([TAG])
    made.time("now-1h", "now").refresh("10s").readonly().tooltip(model.DashboardCursorSync.CROSSHAIR)
    made.timezone("browser")
    made.link(
        dashboard.DashboardLink("Planaria")
        .type(model.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .as_dropdown(True)
        .include_vars(True)
        .keep_time(True)
    )
    for variable in _variables(board):
        made.with_variable(variable)
    for marks in board.marks:
        made.annotation(_Mark(marks))
    for identifier, (what, place) in enumerate(board.places(), start=1):
        if isinstance(what, Row):
            made.with_row(dashboard.Row(what.title).id(identifier).grid_pos(place))
        else:
            made.with_panel(render(what, identifier, place))
    return made.build()


def _variables(board: Board) -> Iterator[Builder[model.VariableModel]]:
    yield dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
    # Scrape configurations add the label; where none does, "All" matches series without it.
    yield _query("cluster", "Cluster", "label_values(planaria_run_active, cluster)").include_all(True).all_value(".*")
    runs = _query("run", "Run", 'label_values(planaria_run_active{cluster=~"$cluster"}, run)')
    yield runs if board.one_run else runs.multi(True).include_all(True).all_value(".+")
    if board.with_node:
        nodes = _query("node", "Node", 'label_values(planaria_workers{cluster=~"$cluster", run=~"$run"}, node)')
        yield nodes.multi(True).include_all(True).all_value(".*")


def _query(name: str, label: str, asked: str) -> dashboard.QueryVariable:
    variable = dashboard.QueryVariable(name).label(label).query(asked).datasource(SOURCE)
    return variable.refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(model.VariableSort.ALPHABETICAL_ASC)
