"""Names and labels follow Prometheus' conventions, and what is enumerated is what the platform has."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from planaria.control.policies.states import State
from planaria.layout import Layout
from planaria.metrics.catalogue import AXES, CATALOGUE, METRICS, STATES, STEP_PHASES, Kind, Metric
from planaria.runtime.progress import WITHIN

UNITS = ("seconds", "bytes", "joules", "ratio")


@pytest.mark.parametrize("metric", CATALOGUE.values(), ids=lambda metric: metric.name)
def test_a_name_tells_type_and_unit(metric: Metric) -> None:
    assert re.fullmatch(r"planaria_[a-z_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
    if metric.unit:
        assert metric.unit in UNITS
        assert metric.unit in metric.name
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert "run" not in metric.labels
    assert {label for label, _ in metric.values} <= set(metric.labels)


def test_no_name_stands_twice() -> None:
    assert len(CATALOGUE) == sum(len(group) for group in METRICS.values())


def test_what_is_enumerated_is_what_the_platform_has() -> None:
    assert set(STATES) == {state.value for state in State}
    assert tuple(field.name for field in fields(Layout)) == AXES
    assert set(STEP_PHASES) - {"whole"} == set(WITHIN) - {"evaluate"}
