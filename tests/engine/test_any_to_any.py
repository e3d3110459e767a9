"""From any layout to any other: the state arrives bit for bit, and the losses are those of a run that never moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.forms import long_form
from tests.support.hopping import Station, hop, layouts, route
from tests.support.ranks import RankPool
from tests.support.vlm import vlm_job

from planaria.layout import AXES, Layout

PRESET = "llava-siglip-qwen-tiny"
SEED = 38
PIPELINES = [{"layout.pipeline_schedule": schedule} for schedule in ("gpipe", "1f1b", "zero_bubble")]
STATIONS = [
    Station(layout, overrides)
    for layout in layouts(most_ranks=8, batch=5)
    for overrides in (PIPELINES if layout.pp > 1 else [{}])
]
SMALL = [station for station in STATIONS if station.layout.world <= 4]
OPTIM: dict[str, Any] = {"optim__lr": 3e-3, "optim__schedule": {"kind": "constant", "warmup_steps": 0}}


def _compare(pool: RankPool, folder: Path, stations: list[Station], steps: int, precision: str, limit: float) -> None:
    job = vlm_job(PRESET, train__precision=precision, train__steps=64, **OPTIM)
    print(f"seed {SEED}: " + " -> ".join(map(str, stations)))
    still = hop(pool, job, [Station(Layout())], folder / "still", len(stations) * steps)
    assert hop(pool, job, stations, folder / "moved", steps) == pytest.approx(still, rel=limit)
    assert still[-1] < still[0]


def test_routes_are_drawn_from_all_axes() -> None:
    drawn = route(SEED, SMALL, 5)
    assert drawn == route(SEED, SMALL, 5) != route(SEED + 1, SMALL, 5)
    assert {axis for axis in AXES for station in drawn if getattr(station.layout, axis) > 1} == set(AXES)


def test_four_pairs(pool: RankPool, tmp_path: Path) -> None:
    _compare(pool, tmp_path, route(SEED, SMALL, 5), 1, "fp64", 1e-10)


@long_form
@pytest.mark.parametrize("part", range(4))
def test_twenty_pairs(pool: RankPool, tmp_path: Path, part: int) -> None:
    _compare(pool, tmp_path, route(SEED, STATIONS, 21)[5 * part : 5 * part + 6], 1, "fp64", 1e-10)


@long_form
def test_a_run_through_eight_layouts(pool: RankPool, tmp_path: Path) -> None:
    _compare(pool, tmp_path, route(SEED + 1, STATIONS, 8), 4, "fp32", 1e-5)
