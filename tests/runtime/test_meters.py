"""Readings beside training: phases add up to the step, and meters that begin anew are followed."""

from __future__ import annotations

from pathlib import Path

import pytest

from planaria.runtime import meters as module
from planaria.runtime.energy import Energy
from planaria.runtime.meters import Meters


def test_phases_divide_the_step_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    told: list[tuple[int, str, int]] = []
    sent = [0]
    looks: list[float] = []

    def costly() -> dict[str, float]:
        looks.append(clock[0])
        return {"queue": 2}

    meters = Meters(lambda *place: told.append(place), costly, lambda: sent[0])
    for number in range(2):
        for phase, seconds in (("data", 0.1), ("step", 0.2), ("reduce", 0.1), ("step", 0.05), ("keep", 0.01)):
            meters.at(number, phase, 0)
            clock[0] += seconds
        sent[0] += 40
        readings = meters.take()
        assert readings["phase_s"] == pytest.approx({"data": 0.1, "step": 0.25, "reduce": 0.1, "keep": 0.01})
        assert readings["wire_bytes"] == 40
        assert ("queue" in readings) == (number == 0), "what is costly is read once a second"
        meters.at(number + 1, "agree", 0)  # replicas are compared: of no step
        clock[0] += 0.2
    assert told[:2] == [(0, "data", 0), (0, "step", 0)]
    assert len(looks) == 1


def test_energy_counters_of_sockets_are_followed_past_their_limit(tmp_path: Path) -> None:
    def write(name: str, value: int) -> None:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "energy_uj").write_text(f"{value}\n")
        (folder / "max_energy_range_uj").write_text("9999999\n")

    write("intel-rapl:0", 9_000_000)
    write("intel-rapl:0:0", 5)  # a part of the socket
    (tmp_path / "intel-rapl:1").mkdir()  # shown, and not to be read
    energy = Energy(tmp_path)
    assert energy.read() == {"intel-rapl:0": 0.0}
    write("intel-rapl:0", 500_000)
    assert energy.read() == {"intel-rapl:0": 1.5}
    write("intel-rapl:0", 700_000)
    assert energy.read() == {"intel-rapl:0": pytest.approx(1.7)}
    assert Energy(tmp_path / "none").read() == {}
