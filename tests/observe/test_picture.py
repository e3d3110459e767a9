"""The picture of a run."""

from __future__ import annotations

from xml.etree import ElementTree

from planaria.observe.picture import run_svg, ticks

GENERATIONS = [
    {"event": "generation", "step": 0, "cause": "start", "layout": "dp_shard4", "workers": list("abcd")},
    {"event": "lost", "text": "worker-1 lost"},
    {"event": "generation", "step": 8, "cause": "lost <worker-1>", "layout": "dp_shard3", "workers": list("acd")},
]


def test_every_step_is_a_point_and_every_generation_a_band() -> None:
    metrics = [{"step": step, "loss": 5.0 - step / 10} for step in [*range(10), *range(8, 20)]]
    tree = ElementTree.fromstring(run_svg(metrics, GENERATIONS, "a & b"))
    space = {"s": "http://www.w3.org/2000/svg"}
    points = tree.findall("s:polyline", space)[0].get("points", "").split()
    assert len(points) == 20
    assert len(tree.findall("s:rect", space)) == 1 + 2
    texts = [element.text for element in tree.findall("s:text", space)]
    assert {"a & b", "dp_shard4 (4)", "dp_shard3 (3)", "lost <worker-1>"} <= set(texts)


def test_a_run_without_steps_says_so() -> None:
    assert "no step was completed" in run_svg([], GENERATIONS, "empty")
    assert "no step was completed" in run_svg([{"step": 0, "loss": float("nan")}], [], "nan")
    assert "no step was completed" in run_svg([{"step": 0, "loss": None}], [], "nan as it is written")


def test_ticks_are_round_and_few() -> None:
    assert ticks(319) == [0, 100, 200, 300]
    assert ticks(6.34) == [0, 2, 4, 6]
    assert ticks(0.05) == [0, 0.01, 0.02, 0.03, 0.04, 0.05]
    assert ticks(0) == [0.0]
