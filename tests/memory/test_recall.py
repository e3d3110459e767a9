"""State out of memory: from any layout to any other, also after the loss of a node, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.memory import DTYPES, Case, Nodes, Ranks, Spec, cases, layouts, until

from planaria.layout import Layout
from planaria.memory.client import newest_in_memory
from planaria.memory.recall import MemorySource, MemoryState
from planaria.memory.wire import KeeperError
from planaria.state.boxes import Box

ALL_DTYPES = (Spec("updates", (), torch.int64), *(Spec(f"t{d}", (6, 5), d, tp_dim=0) for d in DTYPES))


def restored(source: MemorySource, case: Case, layout: Layout, nodes: tuple[str, ...], step: int) -> list[MemoryState]:
    """Restore on every rank of ``layout``, and compare with the global tensors."""
    states = []
    target = Case(case.specs, layout, nodes, case.ring)
    values = {spec.name: spec.value(step) for spec in case.specs}
    for rank in range(layout.world):
        wanted = target.part(rank).wanted()
        state = MemoryState(source, nodes[rank], rank, wanted)
        assert state.step == step
        for name, box in wanted:
            expected = values[name][box.relative_to(Box.whole(values[name].shape))]
            assert torch.equal(state.read(name, box), expected), f"{name}{box} on rank {rank}"
        states.append(state)
    return states


@settings(max_examples=50)
@given(cases(fewest_nodes=2, most_ranks=5), layouts(most=5), st.data())
def test_any_layout_restores_what_another_left_after_the_loss_of_a_node(
    case: Case, layout: Layout, data: st.DataObject
) -> None:
    with Nodes() as nodes:
        nodes.add(*case.ring)
        ranks = Ranks(nodes, case)
        for step in (1, 2, 3):
            ranks.step(step)
        ranks.close()
        lost = data.draw(st.sampled_from(case.ring))
        nodes.drop(lost)
        living = [node for node in case.ring if node != lost]
        source = newest_in_memory(nodes.addresses)
        assert source is not None
        assert (source.generation, source.step) == (1, 3)
        places = tuple(data.draw(st.sampled_from(living)) for _ in range(layout.world))
        restored(source, case, layout, places, step=3)
        assert not nodes.told


def test_all_dtypes_come_back_bit_for_bit(nodes: Nodes) -> None:
    case = Case(ALL_DTYPES, Layout(dp_shard=2, tp=2), ("n0", "n0", "n1", "n1"), ("n0", "n1"))
    ranks = Ranks(nodes, case)
    ranks.step(7)
    ranks.close()
    source = newest_in_memory(nodes.addresses)
    assert source is not None
    restored(source, case, Layout(dp_shard=3), ("n0", "n1", "n1"), step=7)


def test_what_the_node_holds_is_not_fetched(nodes: Nodes) -> None:
    specs = (Spec("a", (8, 16)), Spec("b", (4, 4)))
    case = Case(specs, Layout(dp_shard=2), ("n0", "n1"), ("n0", "n1"))
    ranks = Ranks(nodes, case)
    ranks.step(1)
    ranks.close()
    source = newest_in_memory(nodes.addresses)
    assert source is not None
    total = (8 * 16 + 4 * 4) * 4
    # With one copy of everything on the other of two nodes, each node holds all of it.
    for state in restored(source, case, Layout(dp_shard=1, dp_replicate=2), ("n0", "n1"), step=1):
        assert (state.local_bytes, state.remote_bytes) == (total, 0)


def test_only_what_the_node_lacks_is_fetched() -> None:
    with Nodes(replicas=0) as nodes:
        nodes.add("n0", "n1")
        case = Case((Spec("a", (8, 16)),), Layout(dp_shard=2), ("n0", "n1"), ("n0", "n1"))
        ranks = Ranks(nodes, case)
        ranks.step(1)
        ranks.close()
        source = newest_in_memory(nodes.addresses)
        assert source is not None
        half = 4 * 16 * 4
        for state in restored(source, case, Layout(dp_replicate=2), ("n0", "n1"), step=1):
            assert (state.local_bytes, state.remote_bytes) == (half, half)
        # FSDP's cut of four rows each is the very slice that each node holds.
        for state in restored(source, case, Layout(dp_shard=2), ("n0", "n1"), step=1):
            assert (state.local_bytes, state.remote_bytes) == (half, 0)


def test_ranks_take_a_slice_that_several_nodes_hold_from_different_ones() -> None:
    with Nodes(replicas=0) as nodes:
        nodes.add("n0", "n1", "n2")
        case = Case((Spec("a", (8, 16)),), Layout(dp_replicate=2), ("n0", "n1"), ("n0", "n1", "n2"))
        ranks = Ranks(nodes, case)
        ranks.step(1)
        ranks.close()
        source = newest_in_memory(nodes.addresses)
        assert source is not None
        wanted = case.part(0).wanted()
        asked = [set() for _ in range(2)]
        for rank in range(2):
            held = MemoryState(source, "n2", rank, wanted)._by_tensor()
            asked[rank] = held["a"][0][0].node
        assert set(asked) == {"n0", "n1"}


def test_a_keeper_that_is_gone_is_an_error_that_names_it(nodes: Nodes) -> None:
    case = Case((Spec("a", (8, 16)),), Layout(dp_shard=2), ("n0", "n1"), ("n0", "n1"))
    ranks = Ranks(nodes, case)
    ranks.step(1)
    ranks.close()
    source = newest_in_memory(nodes.addresses)
    assert source is not None
    nodes.drop("n1")
    with pytest.raises(KeeperError, match="n1"):
        MemoryState(source, "n9", 1, case.part(0).wanted() + case.part(1).wanted())


def test_a_state_that_no_memory_covers_is_not_offered() -> None:
    with Nodes(replicas=0) as nodes:
        nodes.add("n0", "n1")
        case = Case((Spec("a", (8, 16)),), Layout(dp_shard=2), ("n0", "n1"), ("n0", "n1"))
        ranks = Ranks(nodes, case)
        ranks.step(1)
        ranks.take(2, 1)
        until(lambda: ranks.snapshots[1].settled, "the snapshot of rank 1")
        source = newest_in_memory(nodes.addresses)
        assert source is not None
        assert source.step == 1
        nodes.drop("n0")
        assert newest_in_memory(nodes.addresses) is None
        ranks.close()
