"""What a panel shows, as plain values, and the Grafana panel that follows from it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import heatmap as heat
from grafana_foundation_sdk.models import prometheus as query

SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
"""The Prometheus that the reader chose at the top of the dashboard."""

GOOD, WARN, BAD = "green", "orange", "red"


class Kind(StrEnum):
    """How numbers are drawn."""

    LINES = "lines"
    STACK = "stack"
    NUMBER = "number"
    BARS = "bars"
    STATES = "states"
    HEAT = "heat"
    TABLE = "table"


State = tuple[float, str, str]
"""A value, and the text and colour that it is shown as."""


@dataclass(frozen=True)
class Query:
    """One PromQL expression; ``legend`` names its series, with labels in double braces.

    In a table it is a column, which ``legend`` heads and which has a unit and names of states of its own.
    """

    expr: str
    legend: str = ""
    unit: str = ""
    states: Sequence[State] = ()


@dataclass(frozen=True)
class Panel:
    """One panel.

    ``unit`` is one of Grafana's unit names. ``steps`` are (value, colour) from which on a colour holds; what lies below
    the first is ``floor``. ``width`` counts columns of 24.
    """

    kind: Kind
    title: str
    about: str
    queries: Sequence[Query]
    width: int = 8
    unit: str = "short"
    steps: Sequence[tuple[float, str]] = ()
    floor: str = GOOD
    states: Sequence[State] = ()
    low: float | None = None
    high: float | None = None
    decimals: int | None = None
    link: str | None = None
    """Identifier of the dashboard that says more."""
    log: bool = False
    empty: str = "no data"
    """What stands where nothing was measured, which is not always a fault."""

    def sized(self, width: int) -> Panel:
        """The same panel, ``width`` columns wide."""
        return replace(self, width=width)


AnyPanel = timeseries.Panel | stat.Panel | bargauge.Panel | statetimeline.Panel | heatmap.Panel | table.Panel
P = TypeVar("P", timeseries.Panel, stat.Panel, bargauge.Panel, statetimeline.Panel, heatmap.Panel, table.Panel)


def render(panel: Panel, identifier: int, place: model.GridPos) -> Builder[model.Panel]:
    """Grafana's panel for ``panel`` at ``place``."""
    match panel.kind:
        case Kind.LINES | Kind.STACK:
            return _shared(_lines(panel), panel, identifier, place)
        case Kind.NUMBER:
            return _shared(_number(panel), panel, identifier, place)
        case Kind.BARS:
            return _shared(_bars(), panel, identifier, place)
        case Kind.STATES:
            return _shared(_states(), panel, identifier, place)
        case Kind.HEAT:
            return _shared(_heat(panel), panel, identifier, place)
        case Kind.TABLE:
            return _shared(_table(panel), panel, identifier, place)


def _shared(builder: P, panel: Panel, identifier: int, place: model.GridPos) -> P:
    instant = panel.kind in (Kind.NUMBER, Kind.BARS, Kind.TABLE)
    builder.id(identifier).title(panel.title).description(panel.about).datasource(SOURCE).grid_pos(place)
    builder.unit(panel.unit).no_value(panel.empty)
    for number, asked in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(asked.expr).ref_id(chr(ord("A") + number)).datasource(SOURCE)
        target.legend_format(asked.legend or "__auto")
        if instant:
            target.instant()
        else:
            target.range()
        if panel.kind is Kind.HEAT:
            target.format(query.PromQueryFormat.HEATMAP)
        elif panel.kind is Kind.TABLE:
            target.format(query.PromQueryFormat.TABLE)
        builder.with_target(target)
    # Grafana wants the lowest step without a value: it holds from minus infinity on.
    steps = [model.Threshold(value=None, color=panel.floor)]
    steps += [model.Threshold(value=value, color=color) for value, color in panel.steps]
    builder.thresholds(dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps))
    if panel.states:
        builder.mappings([_named(panel.states)])
    if panel.low is not None:
        builder.min(panel.low)
    if panel.high is not None:
        builder.max(panel.high)
    if panel.decimals is not None:
        builder.decimals(panel.decimals)
    if panel.link:
        # Variables and time go along, so that the other dashboard shows the same run at the same time.
        builder.links(
            [
                dashboard.DashboardLink("More on this")
                .type(model.DashboardLinkType.LINK)
                .url(f"/d/{panel.link}?${{__url_time_range}}&${{__all_variables}}")
            ]
        )
    return builder


def _lines(panel: Panel) -> timeseries.Panel:
    legend = common.VizLegendOptions().show_legend(True).placement(kinds.LegendPlacement.BOTTOM)
    legend.display_mode(kinds.LegendDisplayMode.LIST)
    tooltip = common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI).sort(kinds.SortOrder.DESCENDING)
    chart = timeseries.Panel().legend(legend).tooltip(tooltip).line_width(1).show_points(kinds.VisibilityMode.NEVER)
    if panel.kind is Kind.STACK:
        chart.stacking(common.StackingConfig().mode(kinds.StackingMode.NORMAL).group("A")).fill_opacity(60)
    else:
        chart.fill_opacity(8)
    if panel.steps:
        # A limit is seen where it runs through the chart, not only as the colour of a number.
        chart.thresholds_style(common.GraphThresholdsStyleConfig().mode(kinds.GraphThresholdsStyleMode.DASHED))
    if panel.log:
        chart.scale_distribution(common.ScaleDistributionConfig().type(kinds.ScaleDistribution.LOG).log(10))
    return chart


def _number(panel: Panel) -> stat.Panel:
    number = stat.Panel().color_mode(kinds.BigValueColorMode.VALUE).graph_mode(kinds.BigValueGraphMode.NONE)
    number.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    if any(asked.legend for asked in panel.queries):
        number.text_mode(kinds.BigValueTextMode.VALUE_AND_NAME)
    return number


def _bars() -> bargauge.Panel:
    bars = bargauge.Panel().display_mode(kinds.BarGaugeDisplayMode.BASIC).orientation(kinds.VizOrientation.HORIZONTAL)
    return bars.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False)).min_viz_height(12)


def _states() -> statetimeline.Panel:
    legend = common.VizLegendOptions().show_legend(False)
    return statetimeline.Panel().merge_values(True).row_height(0.8).legend(legend).fill_opacity(80)


def _heat(panel: Panel) -> heatmap.Panel:
    colors = heatmap.HeatmapColorOptions().mode(heat.HeatmapColorMode.SCHEME).scheme("Oranges").steps(64)
    chart = heatmap.Panel().calculate(False).color(colors).hide_legend()
    return chart.y_axis(heatmap.YAxisConfig().unit(panel.unit)).cell_gap(1)


def _table(panel: Panel) -> table.Panel:
    """One line per run: each query is a column, joined by their labels."""
    headings = {f"Value #{chr(ord('A') + number)}": asked.legend for number, asked in enumerate(panel.queries)}
    joined = table.Panel().show_header(True).cell_height(kinds.TableCellHeight.SM)
    joined.with_transformation(model.DataTransformerConfig(id_val="merge", options={}))
    joined.with_transformation(
        model.DataTransformerConfig(
            id_val="organize", options={"excludeByName": {"Time": True}, "renameByName": {"run": "Run"} | headings}
        )
    )
    url = "/d/planaria-training?${__url_time_range}&var-run=${__value.raw}&${datasource:queryparam}"
    joined.override_by_name(
        "Run", [model.DynamicConfigValue(id_val="links", value=[{"title": "Training of this run", "url": url}])]
    )
    for asked in panel.queries:
        shown: list[model.DynamicConfigValue] = []
        if asked.unit:
            shown.append(model.DynamicConfigValue(id_val="unit", value=asked.unit))
        if asked.states:
            shown.append(model.DynamicConfigValue(id_val="mappings", value=[_named(asked.states)]))
        if shown:
            joined.override_by_name(asked.legend, shown)
    return joined


def _named(states: Sequence[State]) -> model.ValueMap:
    return model.ValueMap(
        options={
            f"{value:g}": model.ValueMappingResult(text=text, color=color, index=number)
            for number, (value, text, color) in enumerate(states)
        }
    )
