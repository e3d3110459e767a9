"""The benchmark of pipelines: figures follow from rows, and the sleeping model is one that the engine can cut."""

from __future__ import annotations

import pytest
import torch

import pipeline
from _pipeline.sleepers import Sleepers, Times
from _report import Report, check
from planaria.engine.split_backward import Postponed


def test_figures_and_tables():
    bubble = {"case": "bubble", "schedule": "1f1b", "pp": 4, "virtual": 1, "micros": 8, "seconds": [1.0, 1.2]}
    rows = [
        bubble | {"bubble": 0.3, "theory": 0.25},
        bubble | {"bubble": 0.2, "theory": 0.19},
        {"case": "equal layers", "seconds": [3.0], "median_s": 3.0, "layers": [16] * 4},
        {"case": "balanced", "seconds": [2.0], "median_s": 2.0, "layers": [34, 10, 10, 10]},
    ]
    made = pipeline.build_report(rows, pipeline.parse(["--quick"]), "2026-01-01")
    assert made.figures == {"bubble_vs_theory": pytest.approx(1.2), "balanced_stage_speedup": 1.5}
    check({**made.__dict__, "tables": []})
    assert "34 10 10 10" in made.markdown() and isinstance(made, Report)


def test_a_sleeper_sleeps_for_what_is_asked_of_it(monkeypatch):
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    frozen, trained = Times(1, 2, 4, trains=False), Times(8, 16, 32)
    model, later = Sleepers([frozen, trained, frozen]), Postponed()
    out = model(torch.zeros(1, 1, 4))
    out.sum().backward()
    assert sum(slept) == 1 + 8 + 1 + 2 + 32  # nothing before the trained layer waits for a gradient
    slept.clear()
    for layer in model.layers:
        layer.postpone_to(later)
    out = model(torch.zeros(1, 1, 4))
    later.collect()
    out.sum().backward()
    work = later.take()
    assert sum(slept) == 1 + 8 + 1 + 2
    work[0]()
    assert sum(slept) == 1 + 8 + 1 + 2 + 32


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--unit", "0"]])
def test_arguments_that_measure_nothing(arguments):
    with pytest.raises(SystemExit):
        pipeline.parse(arguments)
