"""One HTML file that needs nothing else: no network, no script, no font."""

from __future__ import annotations

import time

import jinja2
from markupsafe import Markup

from planaria.observe.report.care import checkpoints, data
from planaria.observe.report.elastic import recoveries, shape, wall_time
from planaria.observe.report.episodes import spans
from planaria.observe.report.headline import headline, verdict
from planaria.observe.report.history import History
from planaria.observe.report.record import events, surroundings
from planaria.observe.report.training import throughput, training
from planaria.observe.text import duration


def page(history: History) -> str:
    """The report of a run as HTML text."""
    generations = spans(history.events, history.starts, history.ended)
    sections = [
        training(history, generations),
        shape(history, generations),
        recoveries(generations),
        wall_time(history),
        throughput(history),
        checkpoints(history, generations),
        data(history),
        surroundings(history),
        events(history),
    ]
    loader = jinja2.PackageLoader("planaria.observe.report", "templates")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    style, _, _ = loader.get_source(environment, "page.css")
    state, says = verdict(history)
    return environment.get_template("page.html").render(
        name=history.name,
        state=state,
        says=says,
        began=_clock(history.began),
        lasted=duration(max(0.0, history.ended - history.began)),
        written=_clock(history.now),
        figures=headline(history, generations),
        problems=history.problems,
        sections=sections,
        style=Markup(style),
        drawn=Markup,
    )


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(at))
