"""Every PromQL expression of the dashboards and rules, with the place that it stands in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser
import yaml

from planaria.dashboards.board import Board, Row
from planaria.dashboards.boards import BOARDS
from planaria.dashboards.panels import Kind

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "dashboards"
RULES = FOLDER / "prometheus" / "rules" / "planaria.yaml"
RULE_TESTS = FOLDER / "prometheus" / "tests" / "planaria.yaml"

_VARIABLES = {"$__rate_interval": "1m", "$__range": "15m", "$cluster": ".*", "$run": ".+", "$node": ".*"}


class Query(NamedTuple):
    """An expression without variables of Grafana."""

    place: str
    expr: str
    ranged: bool = False
    """Asked over a range of time, as charts are, and not of one moment."""


def plain(expr: str) -> str:
    """The expression as Grafana sends it to Prometheus."""
    for name, value in _VARIABLES.items():
        expr = expr.replace(name, value)
    assert "$" not in expr, f"a variable that no dashboard has: {expr}"
    return expr


def of_board(board: Board) -> Iterator[Query]:
    """Panels and annotations of a dashboard."""
    for what, _ in board.places():
        if not isinstance(what, Row):
            ranged = what.kind not in (Kind.NUMBER, Kind.BARS, Kind.TABLE)
            for asked in what.queries:
                yield Query(f"{board.title}: {what.title} {asked.legend}", plain(asked.expr), ranged)
    for marks in board.marks:
        yield Query(f"{board.title}: mark {marks.name}", plain(marks.expr), True)


def rules() -> list[dict[str, Any]]:
    """Recording and alert rules as they stand in the file."""
    text = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    return [rule for group in text["groups"] for rule in group["rules"]]


def of_rules() -> Iterator[Query]:
    """All rules."""
    for rule in rules():
        yield Query(f"rule {rule.get('record') or rule['alert']}", rule["expr"])


def everything() -> list[Query]:
    """Panels, annotations and rules."""
    return [query for board in BOARDS for query in of_board(board)] + list(of_rules())


class Selector(NamedTuple):
    """A metric that an expression reads, and the labels that it matches."""

    name: str
    labels: dict[str, str]


def selectors(expr: str) -> list[Selector]:
    """What an expression reads.

    Raises:
        ValueError: it is no PromQL.
    """
    found: list[Selector] = []
    for node in _nodes(promql_parser.parse(expr)):
        selector = node.vector_selector if isinstance(node, promql_parser.MatrixSelector) else node
        if isinstance(selector, promql_parser.VectorSelector):
            labels = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
            found.append(Selector(selector.name or labels.pop("__name__"), labels))
    return found


def grouped(expr: str) -> set[str]:
    """Labels that an expression groups or joins by."""
    groups = re.findall(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)", expr)
    return {label.strip() for group in groups for label in group.split(",") if label.strip()}


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for name in ("lhs", "rhs", "expr", "param"):
        if (child := getattr(node, name, None)) is not None:
            yield from _nodes(child)
    for child in getattr(node, "args", None) or ():
        yield from _nodes(child)
