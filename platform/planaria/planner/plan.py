"""Which layout for which workers: one pure function; 10 ms for a thousand workers, 100 ms for ten thousand."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from planaria.config import LayoutConfig
from planaria.layout import Layout
from planaria.planner import pipelines


class PlanError(ValueError):
    """No legal layout; the message gives the numbers and the remedy."""


@dataclass(frozen=True)
class WorkerSlot:
    """A worker process that could take a rank, and the node it lives on."""

    id: str
    node: str


@dataclass(frozen=True)
class ModelFacts:
    """What the planner must know of a model."""

    tp_divides: Mapping[str, int] = field(default_factory=dict)
    """Counts that the TP degree must divide (attention heads, FFN columns, ...), by the name to show in an error."""
    parameters: int = 0
    cp_divides: Mapping[str, int] = field(default_factory=dict)
    """Counts that TP x CP must divide: the query heads of the layers whose sequence CP splits."""
    stages: int | None = None
    """Most pipeline stages that the model can be cut into; None: not known."""


@dataclass(frozen=True)
class Plan:
    """A layout and who sits where in it. ``ranks[r]`` is the id of the worker that takes rank ``r``."""

    layout: Layout
    ranks: tuple[str, ...]
    spares: tuple[str, ...]
    reason: str

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """The workers that work on one slice of the batch together (TP x CP), in order of their ranks."""
        size = self.layout.tp * self.layout.cp
        return [self.ranks[start : start + size] for start in range(0, len(self.ranks), size)]


def plan(
    workers: Sequence[WorkerSlot],
    constraints: LayoutConfig,
    facts: ModelFacts,
    global_batch: int,
    previous: Plan | None = None,
) -> Plan:
    """Lay out a job over the workers that live.

    **Tensor parallelism** keeps the configured degree while a single node can host one TP group, even where a
    smaller degree could use more workers: changing the degree reshards every tensor, while dropping a replica
    moves next to nothing, and a degree is configured because a model needs it (memory) or likes it (speed).
    The price is idle workers on nodes whose count the degree does not divide; ``reason`` says how many and
    what would use them. Only when no node can host a group does the degree fall, to its largest divisor that
    fits. Having fallen, it returns to the configured degree once that uses no fewer workers than now: a single
    large node that joins must not idle the rest. TP groups never span nodes.

    **Context parallelism** keeps its degree while tp x cp workers fit a node, since its all-to-alls are as frequent as
    TP's all-reduces; else it falls to the largest divisor that fits, after TP. What is said of TP's return holds for
    both together.

    **Pipeline parallelism** keeps its degree while there are as many groups of tp x cp, on whatever nodes; else it
    falls to its largest divisor for which there are, and returns as TP does.

    **Data parallelism** takes all the rest, one replica per pp groups of tp x cp, at most one per sample of the global
    batch. ``dp_replicate`` is the largest divisor of the number of replicas that is not above the preferred one.

    **Places.** The same workers in any order give the same plan. A node's ranks are contiguous. With
    ``previous``, at the same TP and CP degrees, a group that is whole stays whole, the other survivors keep their
    place inside their group where the group can be refilled, and groups and nodes keep their order: with
    groups of one, survivors keep their relative order. Stages follow the order of the nodes; with ``previous``, at the
    same PP degree, groups keep their stage. So the least state has to move.

    Args:
        workers: all that are ready, unique by id.
        constraints: preferred degrees.
        facts: what limits the degrees.
        global_batch: samples per optimizer step.
        previous: the plan that the survivors come from, if any.

    Raises:
        PlanError: no workers, a duplicate id, no samples, or a configured TP degree that the model cannot have.
    """
    _check(workers, constraints, facts, global_batch)
    before = {worker: rank for rank, worker in enumerate(previous.ranks)} if previous else {}
    nodes = _by_node(workers, before)
    tp, cp = _inside_a_node(constraints, nodes, global_batch, previous)
    size = tp * cp

    kept = previous.groups if previous and (previous.layout.tp, previous.layout.cp) == (tp, cp) else []
    seats = {worker: (index, place) for index, group in enumerate(kept) for place, worker in enumerate(group)}
    groups = [group for members in nodes.values() for group in _groups_of_node(members, size, seats)]
    pp = pipelines.degree(constraints.pp, len(groups), global_batch, previous.layout.pp if previous else None)
    replicas = min(len(groups) // pp, global_batch)
    known, world = (before, len(previous.ranks)) if previous and previous.layout.pp == pp else ({}, 0)
    ranks = tuple(worker for group in pipelines.by_stage(groups, pp, replicas, known, world) for worker in group)
    used = set(ranks)
    spares = tuple(worker for members in nodes.values() for worker in members if worker not in used)

    replicate = max(d for d in range(1, min(constraints.dp_replicate, replicas) + 1) if replicas % d == 0)
    layout = Layout(pp=pp, dp_replicate=replicate, dp_shard=replicas // replicate, cp=cp, tp=tp)
    return Plan(layout, ranks, spares, _reason(layout, constraints, nodes, len(groups), global_batch))


def _check(workers: Sequence[WorkerSlot], constraints: LayoutConfig, facts: ModelFacts, global_batch: int) -> None:
    if not workers:
        raise PlanError("no worker is ready, so there is nothing to plan; add a node, or wait for one to return")
    if global_batch < 1:
        raise PlanError(f"train.global_batch={global_batch} holds no sample; give at least 1")
    twice = [worker for worker, count in Counter(slot.id for slot in workers).items() if count > 1]
    if twice:
        raise PlanError(f"worker ids must be unique; given more than once: {', '.join(sorted(twice))}")
    tp = constraints.tp
    wrong = [f"{name}={count}" for name, count in sorted(facts.tp_divides.items()) if count % tp]
    if wrong:
        common = math.gcd(*facts.tp_divides.values())
        legal = [d for d in range(1, min(common, 1024) + 1) if common % d == 0]
        below = max(d for d in legal if d <= tp)
        raise PlanError(
            f"layout.tp={tp} does not divide the model's {', '.join(wrong)}; "
            f"set layout.tp={below} (possible: {', '.join(map(str, legal))})"
        )
    size = tp * constraints.cp
    wrong = [f"{name}={count}" for name, count in sorted(facts.cp_divides.items()) if count % size]
    if wrong:
        largest = max(
            d for d in range(1, constraints.cp + 1) if not any(n % (tp * d) for n in facts.cp_divides.values())
        )
        raise PlanError(
            f"layout.cp={constraints.cp} with layout.tp={tp}: {size} does not divide the model's {', '.join(wrong)}; "
            f"set layout.cp={largest}"
        )
    stages = constraints.pp * constraints.virtual_stages
    if constraints.pp > 1 and facts.stages is not None and stages > facts.stages:
        remedy = max(1, facts.stages // constraints.virtual_stages)
        raise PlanError(
            f"layout.pp={constraints.pp} with layout.virtual_stages={constraints.virtual_stages}: {stages} stages, but "
            f"the model has only {_count(facts.stages, 'layer')} to cut between; set layout.pp={remedy}"
        )


@functools.lru_cache(32768)
def _natural(text: str) -> tuple[list[str | int], str]:
    """Sort key that puts worker-2 before worker-10."""
    parts: list[str | int] = [int(part) if odd % 2 else part for odd, part in enumerate(re.split(r"([0-9]+)", text))]
    return parts, text


def _by_node(workers: Sequence[WorkerSlot], before: Mapping[str, int]) -> dict[str, list[str]]:
    """Worker ids of every node: survivors first, by their rank before, then the rest by name; nodes likewise."""
    # Only newcomers are sorted by name, which is what takes the time: a re-plan has few.
    survivors = sorted((slot for slot in workers if slot.id in before), key=lambda slot: before[slot.id])
    members: dict[str, list[str]] = {}
    for slot in survivors:
        members.setdefault(slot.node, []).append(slot.id)
    old = list(members)
    newcomers = (slot for slot in workers if slot.id not in before)
    for slot in sorted(newcomers, key=lambda slot: _natural(slot.id)):
        members.setdefault(slot.node, []).append(slot.id)
    return {node: members[node] for node in [*old, *sorted(list(members)[len(old) :], key=_natural)]}


def _inside_a_node(
    preferred: LayoutConfig, nodes: Mapping[str, list[str]], global_batch: int, previous: Plan | None
) -> tuple[int, int]:
    """(tp, cp): degrees whose ranks stay in one node."""
    largest = max(map(len, nodes.values()))
    tp = _largest_divisor(preferred.tp, largest)
    cp = _largest_divisor(preferred.cp, largest // tp)
    if previous:
        now = previous.layout
        possible = now.tp * now.cp <= largest and preferred.tp % now.tp == 0 and preferred.cp % now.cp == 0
        pp = preferred.pp
        if possible and _usable(nodes, tp * cp, global_batch, pp) < _usable(nodes, now.tp * now.cp, global_batch, pp):
            return now.tp, now.cp
    return tp, cp


def _largest_divisor(number: int, limit: int) -> int:
    return max(d for d in range(1, min(number, limit) + 1) if number % d == 0)


def _usable(nodes: Mapping[str, list[str]], size: int, global_batch: int, pp: int) -> int:
    """How many workers a layout with groups of ``size`` occupies."""
    groups = sum(len(members) // size for members in nodes.values())
    return pipelines.usable(groups, pipelines.degree(pp, groups, global_batch, None), global_batch) * size


def _groups_of_node(members: list[str], size: int, seats: Mapping[str, tuple[int, int]]) -> list[tuple[str, ...]]:
    """As many groups of ``size`` as the node can host, those of the previous plan first.

    ``seats`` holds group and place of every worker in the previous plan.
    """
    count = len(members) // size
    if size == 1 or not seats:  # survivors come first, in order
        return [tuple(members[start : start + size]) for start in range(0, count * size, size)]
    seated = [worker for worker in members if worker in seats]
    # The most complete groups go on; Counter keeps the order of first sight, sorting is stable.
    alive = Counter(seats[worker][0] for worker in seated)
    going_on = sorted(sorted(alive, key=lambda group: -alive[group])[:count])
    frames: list[list[str | None]] = [[None] * size for _ in range(count)]
    frame_of = dict(zip(going_on, frames, strict=False))
    waiting: list[list[str]] = [[] for _ in range(size)]  # survivors of groups that are given up, by place
    for worker in seated:
        group, place = seats[worker]
        if group in frame_of:
            frame_of[group][place] = worker
        else:
            waiting[place].append(worker)

    for place, candidates in enumerate(waiting):  # the same place in another group needs no state moved
        for frame in frames:
            if frame[place] is None and candidates:
                frame[place] = candidates.pop(0)
    filler = iter([worker for worker in members if worker not in seats] + [w for place in waiting for w in place])
    return [tuple(worker or next(filler) for worker in frame) for frame in frames]


def _reason(
    layout: Layout, constraints: LayoutConfig, nodes: Mapping[str, list[str]], groups: int, global_batch: int
) -> str:
    size, preferred = layout.tp * layout.cp, constraints.tp * constraints.cp
    degrees = f"tp={layout.tp}" if constraints.cp == 1 else f"tp={layout.tp}, cp={layout.cp}"
    wanted = f"tp={constraints.tp}" if constraints.cp == 1 else f"tp={constraints.tp}, cp={constraints.cp}"
    total = sum(map(len, nodes.values()))
    parts = [f"{layout}: {layout.world} of {_count(total, 'worker')} on {_count(len(nodes), 'node')}"]
    largest = max(map(len, nodes.values()))
    if size < preferred and largest < preferred:
        instead = wanted.removeprefix("tp=") if constraints.cp == 1 else wanted
        parts.append(f"{degrees} instead of {instead}: no node has more than {_count(largest, 'worker')}")
    elif size < preferred:
        usable = _usable(nodes, preferred, global_batch, constraints.pp)
        parts.append(f"{degrees} kept: {wanted} could use only {usable} of {total} workers")
    if layout.dp_replicate < constraints.dp_replicate:
        parts.append(
            f"dp_replicate={layout.dp_replicate} instead of {constraints.dp_replicate}: "
            f"must divide {_count(layout.dp, 'replica')}"
        )
    replicas, over = divmod(groups, layout.pp)
    if layout.pp < constraints.pp:
        parts.append(_reason_of_pp(layout, constraints, groups, global_batch))
    if over:
        parts.append(
            f"{_count(over * size, 'spare')}: pp={layout.pp} does not divide {_count(groups, 'group')} of tp x cp"
        )
    if layout.dp < replicas:
        idle = (replicas - layout.dp) * layout.pp * size
        parts.append(f"{_count(idle, 'spare')}: the global batch has {_count(layout.dp, 'sample')}, one per replica")
    ragged = sum(len(members) % size for members in nodes.values())
    if ragged:
        remedy = "layout.tp=1 uses" if layout.cp == 1 else "layout.tp=1 and layout.cp=1 use"
        parts.append(
            f"{_count(ragged, 'spare')}: {_product(layout)} does not divide their nodes' workers; {remedy} all"
        )
    return "; ".join(parts)


def _reason_of_pp(layout: Layout, constraints: LayoutConfig, groups: int, global_batch: int) -> str:
    if groups < constraints.pp:
        return f"pp={layout.pp} instead of {constraints.pp}: only {_count(groups, 'group')} of tp x cp"
    could = pipelines.usable(groups, constraints.pp, global_batch)
    return f"pp={layout.pp} kept: pp={constraints.pp} could use only {could} of {_count(groups, 'group')} of tp x cp"


def _product(layout: Layout) -> str:
    return f"tp={layout.tp}" if layout.cp == 1 else f"tp x cp = {layout.tp * layout.cp}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
