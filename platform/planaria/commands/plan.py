"""``planaria plan``: which layout the planner would choose, for a whole cluster and for what is left of it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from planaria.commands.failures import UsageError
from planaria.config import JobConfig, load
from planaria.planner.plan import ModelFacts, Plan, WorkerSlot
from planaria.planner.plan import plan as plan_layout

MOST_NODES = 4096


@dataclass(frozen=True)
class Outlook:
    """What would happen on one cluster."""

    nodes: int
    workers: int
    plan: Plan | None
    """None where too few workers are left."""
    note: str


def parse_nodes(text: str) -> list[int]:
    """Workers per node: ``4x2`` is four nodes of two, ``2,2,1`` lists them, ``3x2,1x8`` mixes.

    Raises:
        UsageError: anything else.
    """
    sizes: list[int] = []
    for part in text.replace("+", ",").split(","):
        match = re.fullmatch(r"\s*(?:(\d+)\s*[x*]\s*)?(\d+)\s*", part)
        count, size = (int(match.group(1) or 1), int(match.group(2))) if match else (0, 0)
        if not 1 <= count <= MOST_NODES or not 1 <= size <= MOST_NODES:
            raise UsageError(
                f"--nodes {text}: {part.strip()!r} is not a number of nodes; "
                "give e.g. 4x2 (4 nodes of 2 workers each) or 2,2,1"
            )
        sizes += [size] * count
    if len(sizes) > MOST_NODES:
        raise UsageError(f"--nodes {text}: more than {MOST_NODES} nodes")
    return sizes


def default_nodes(job: JobConfig) -> list[int]:
    """The smallest cluster that carries the most workers: nodes of one group of tp x cp each."""
    size = job.layout.tp * job.layout.cp
    return [size] * math.ceil(job.elastic.max_workers / size)


def outlooks(job: JobConfig, facts: ModelFacts, sizes: Sequence[int]) -> list[Outlook]:
    """The plan for all nodes, then after the loss of the last, of the last two, and so on down to one node."""
    found: list[Outlook] = []
    previous: Plan | None = None
    for left in range(len(sizes), 0, -1):
        slots = [WorkerSlot(f"n{node}.{at}", f"n{node}") for node in range(left) for at in range(sizes[node])]
        total = len(slots)
        if total < job.elastic.min_workers:
            note = f"waits up to {job.elastic.wait_s:g} s for elastic.min_workers={job.elastic.min_workers}, then stops"
            found.append(Outlook(left, total, None, note))
            continue
        slots = slots[: job.elastic.max_workers]
        previous = plan_layout(slots, job.layout, facts, job.train.global_batch, previous)
        notes = previous.reason.split("; ")[1:]
        if total > len(slots):
            notes.append(f"{total - len(slots)} not started: elastic.max_workers={job.elastic.max_workers}")
        found.append(Outlook(left, total, previous, "; ".join(notes)))
    return found


def plan(config: str, overrides: Sequence[str], nodes: str | None) -> int:
    """Print the plans of a job."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from planaria.observe.view import encodable, is_plain

    job = load(config, overrides)
    sizes = parse_nodes(nodes) if nodes is not None else default_nodes(job)
    facts = facts_of(job)
    console = Console(highlight=False)
    batch = job.train.global_batch
    console.print(
        Text(
            f"{job.name}: {facts.parameters / 1e6:.3g} M parameters, global batch {batch}, "
            f"preferred tp={job.layout.tp}, {job.elastic.min_workers} to {job.elastic.max_workers} workers"
        )
    )
    table = Table(box=box.ASCII2 if is_plain(console) else box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("nodes", "workers", "layout", "active", "spare", "samples per replica", "remarks"):
        table.add_column(name, justify="left" if name in ("layout", "remarks") else "right", overflow="fold")
    for look in outlooks(job, facts, sizes):
        cells = [str(look.nodes), str(look.workers)]
        if look.plan is None:
            cells += ["none", "0", str(look.workers), "-"]
        else:
            least, most = batch // look.plan.layout.dp, math.ceil(batch / look.plan.layout.dp)
            samples = str(least) if least == most else f"{least} or {most}"
            cells += [str(look.plan.layout), str(len(look.plan.ranks)), str(len(look.plan.spares)), samples]
        table.add_row(*(Text(encodable(cell, console.encoding)) for cell in [*cells, look.note]))
    console.print(table)
    return 0


def facts_of(job: JobConfig) -> ModelFacts:
    """What the planner must know of the job's model; checks the job against it on the way."""
    from planaria.engine.facts import model_facts
    from planaria.models.choose import job_recipe

    return model_facts(job_recipe(job), job)
