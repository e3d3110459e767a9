"""A training state over made-up ranks and nodes, and real keepers on the loopback interface to hold it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from planaria.engine.protocol import Held
from planaria.layout import AXES, Layout
from planaria.memory.client import announce_ring
from planaria.memory.coverage import Holding
from planaria.memory.keeper import Drain, Keeper
from planaria.memory.placement import shipments
from planaria.memory.snapshots import Snapshots
from planaria.memory.table import Table
from planaria.memory.wire import KeeperAddress, KeeperLink
from planaria.runtime.keeping import describe
from planaria.state.boxes import Box, shard_rows, split_dim

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)
SHARED = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Spec:
    """One tensor of the state: how it is shaped, and cut."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    tp_dim: int | None = None
    sharded: bool = True

    def boxes(self, layout: Layout) -> Iterator[tuple[int, Box, tuple[str, ...]]]:
        """(rank, box, axes over which it is replicated) for every rank."""
        for rank in range(layout.world):
            at = layout.coords(rank)
            box, cut = Box.whole(self.shape), set()
            if self.tp_dim is not None and self.shape[self.tp_dim] % layout.tp == 0:
                box, cut = split_dim(self.shape, self.tp_dim, at["tp"], layout.tp), {"tp"}
            if self.sharded and self.shape:
                box = shard_rows(box.shape, at["dp_shard"], layout.dp_shard).within(box)
                cut.add("dp_shard")
            yield rank, box, tuple(axis for axis in AXES if axis not in cut)

    def value(self, step: int) -> Tensor:
        """The whole tensor after ``step`` steps."""
        dice = torch.Generator().manual_seed(zlib.crc32(repr((self.name, self.shape, step)).encode()))
        raw = torch.randint(0, 256, self.shape, generator=dice)
        return raw.to(torch.float32).mul(1.37).to(self.dtype) if self.dtype.is_floating_point else raw.to(self.dtype)


class Part:
    """Stands for the engine of one rank: what :func:`planaria.runtime.keeping.describe` and snapshots need of it."""

    def __init__(self, specs: Sequence[Spec], layout: Layout, rank: int, step: int | None = None) -> None:
        self.layout, self.rank, self.step_done, self._specs = layout, rank, step, specs

    def state(self) -> Iterator[Held]:
        """This rank's slices after ``step_done`` steps; without that, only their shapes."""
        for spec in self._specs:
            box, axes = next((box, axes) for rank, box, axes in spec.boxes(self.layout) if rank == self.rank)
            if self.step_done is None:
                value = torch.empty(box.shape, dtype=spec.dtype, device="meta")
            else:
                value = spec.value(self.step_done)[box.relative_to(Box.whole(spec.shape))].contiguous()
            yield Held(spec.name, spec.shape, box, axes, value)

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the whole state."""
        return {spec.name: spec.shape for spec in self._specs}

    def wanted(self) -> list[tuple[str, Box]]:
        """What it would restore."""
        return [(held.tensor, held.box) for held in self.state()]


@dataclass(frozen=True)
class Case:
    """A state, and which rank runs where."""

    specs: tuple[Spec, ...]
    layout: Layout
    nodes: tuple[str, ...]
    """Node of every rank."""
    ring: tuple[str, ...]
    """Nodes that have a keeper: those of the ranks, and perhaps more."""

    def part(self, rank: int, step: int | None = None) -> Part:
        return Part(self.specs, self.layout, rank, step)

    def table(self, rank: int) -> Table:
        return describe(self.part(rank), rank, self.nodes)  # type: ignore[arg-type]

    def tables(self) -> list[Table]:
        return [self.table(rank) for rank in range(self.layout.world)]

    def tensors(self, rank: int, table: Table, step: int) -> list[Tensor]:
        """The slices of a snapshot, in the order of its table."""
        held = {item.tensor: item.value for item in self.part(rank, step).state()}
        return [held[entry.tensor] for entry in table.entries]

    def holdings(self, replicas: int, generation: int = 1, step: int = 1) -> tuple[list[Holding], dict[str, Table]]:
        """What all nodes hold once every copy has arrived."""
        found: list[Holding] = []
        known: dict[str, Table] = {}
        for rank, table in enumerate(self.tables()):
            own = self.nodes[rank]
            places = [(own, False, table)]
            sent = shipments(table, own, sorted(self.ring), replicas)
            places += [(node, True, table.subset(chosen)) for node, chosen in sent.items()]
            for node, replica, held in places:
                known[held.digest] = held
                found.append(Holding(node, f"w{rank}", replica, generation, step, held.digest, ""))
        return found, known


@st.composite
def specs(draw: st.DrawFn) -> tuple[Spec, ...]:
    """Up to five tensors, a scalar among them."""
    found = [Spec("updates", (), torch.int64)]
    for at in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        tp_dim = draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None
        found.append(Spec(f"t{at}", shape, draw(st.sampled_from(DTYPES)), tp_dim, draw(st.booleans())))
    return tuple(found)


@st.composite
def layouts(draw: st.DrawFn, most: int = 8) -> Layout:
    """Layouts of up to ``most`` ranks."""
    replicate = draw(st.integers(1, min(3, most)))
    shard = draw(st.integers(1, most // replicate))
    return Layout(dp_replicate=replicate, dp_shard=shard, tp=draw(st.integers(1, most // (replicate * shard))))


@st.composite
def cases(draw: st.DrawFn, *, fewest_nodes: int = 1, most_ranks: int = 8) -> Case:
    """Random states over random ranks on random nodes."""
    layout = draw(layouts(most_ranks))
    ring = tuple(f"n{at}" for at in range(draw(st.integers(fewest_nodes, 4))))
    nodes = tuple(draw(st.sampled_from(ring)) for _ in range(layout.world))
    return Case(draw(specs()), layout, nodes, ring)


def until(condition: Callable[[], Any], what: str, limit_s: float = 20.0) -> None:
    """Wait until something comes true."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {limit_s} s"
        time.sleep(0.002)


def python(code: str, *args: str) -> subprocess.Popen[str]:
    """Another process that runs ``code``; kill it."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code, *args], stdin=pipe, stdout=pipe, text=True, env=env)


@dataclass
class Nodes:
    """Keepers of made-up nodes, all in this process."""

    replicas: int = 1
    folder: str = SHARED
    told: list[dict[str, Any]] = field(default_factory=list)
    keepers: dict[str, Keeper] = field(default_factory=dict)

    def add(self, *names: str, drain: Drain = lambda stack, buffer, message: None, token: str = "secret") -> None:
        for name in names:
            tell = self.told.append
            self.keepers[name] = Keeper(name, "127.0.0.1", token, self.folder, self.replicas, tell, drain)
        self.announce()

    @property
    def addresses(self) -> list[KeeperAddress]:
        return [keeper.address for keeper in self.keepers.values()]

    def announce(self) -> None:
        announce_ring(self.addresses)

    def drop(self, name: str) -> None:
        """Lose a node, and with it its memory."""
        self.keepers.pop(name).close()

    def kinds(self) -> list[str]:
        return [message["t"] for message in self.told]

    def snapshots(self, node: str, owner: str, table: Table, generation: int = 1, strict: bool = True) -> Snapshots:
        link = KeeperLink(self.keepers[node].address)
        return Snapshots(link, generation, owner, table, CPU, strict)

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.keepers):
            self.drop(name)


class Ranks:
    """All ranks of a case, each with its snapshots on its node's keeper."""

    def __init__(self, nodes: Nodes, case: Case, generation: int = 1, strict: bool = True) -> None:
        self.case, self.nodes, self.generation = case, nodes, generation
        self.tables = case.tables()
        self.snapshots = [
            nodes.snapshots(case.nodes[rank], f"w{rank}", table, generation, strict)
            for rank, table in enumerate(self.tables)
        ]

    def wait(self) -> None:
        """Wait until every rank may take a snapshot."""
        for snapshots in self.snapshots:
            assert snapshots.wait_ready(20.0, lambda: False)

    def take(self, step: int, *ranks: int) -> None:
        """A snapshot of ``step`` by these ranks, or all."""
        for rank in ranks or range(len(self.tables)):
            self.snapshots[rank].take(step, self.case.tensors(rank, self.tables[rank], step))

    def step(self, step: int) -> None:
        """Have the state of ``step`` in memory, complete."""
        self.wait()
        for snapshots in self.snapshots:
            snapshots.note_complete()
        self.take(step)
        self.wait()

    def close(self) -> None:
        for snapshots in self.snapshots:
            snapshots.close()
