"""Scripts follow from their seed alone, and never ask for what cannot happen."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.chaos.kinds import KINDS, choose
from tests.chaos.node_faults import NodeKilled, NodeReturns
from tests.chaos.script import write_script
from tests.chaos.times import percentile
from tests.chaos.world import NODES, World

SUPPORTED, _ = choose((), {})


def test_one_seed_one_script() -> None:
    assert write_script(3, 60, SUPPORTED) == write_script(3, 60, SUPPORTED)
    assert write_script(3, 60, SUPPORTED) != write_script(4, 60, SUPPORTED)


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_comes(seed: int) -> None:
    script = write_script(seed, 100, KINDS)
    assert len(script) == 100
    assert {act.fault.kind for act in script} == {kind.kind for kind in KINDS}


@pytest.mark.parametrize("seed", range(20))
def test_the_world_never_grows_beyond_its_size(seed: int) -> None:
    world = World.fresh()
    assert len(world.nodes) == NODES
    assert not NodeReturns.possible(world)
    for act in write_script(seed, 100, [NodeKilled, NodeReturns]):
        if isinstance(act.fault, NodeReturns):
            assert world.missing
            assert world.add(act.fault.cpus) == act.fault.node
        elif isinstance(act.fault, NodeKilled):
            world.remove(act.fault.node)
        assert 1 <= len(world.nodes) <= NODES


def test_kinds_that_cannot_go_on_for_ever_are_refused() -> None:
    with pytest.raises(ValueError, match="can happen"):
        write_script(1, 10, [NodeKilled])


def test_kinds_are_left_out_by_name_and_with_a_reason() -> None:
    kinds, reasons = choose((), {"slow rank": "not here"})
    assert {kind.kind for kind in kinds} | set(reasons) == {kind.kind for kind in KINDS}
    assert reasons["slow rank"] == "not here"
    assert all(reasons[kind.kind] for kind in KINDS if kind.unsupported)
    assert [kind.__name__ for kind in choose(("NodeDrained",), {})[0]] == ["NodeDrained"]
    with pytest.raises(ValueError, match="Nonsense"):
        choose(("Nonsense",), {})
    assert max(Counter(kind.kind for kind in KINDS).values()) == 1


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.95, 1.0)] == [1.0, 50.0, 95.0, 100.0]
    assert percentile([7.0], 0.95) == 7.0
