"""The start of a generation: where its state comes from, who sits where, and the orders to the workers."""

from __future__ import annotations

import threading
import time
from typing import Any

from planaria.control import journal
from planaria.control.choosing import choose
from planaria.control.custody import Source, step_of, where
from planaria.control.desk import Desk
from planaria.control.events import Gone
from planaria.control.generation import Generation
from planaria.control.health import go_back
from planaria.control.policies.states import State
from planaria.memory.recall import MemorySource
from planaria.runtime.groups import Rendezvous, forget_generations
from planaria.runtime.worker import Order


def launch(desk: Desk) -> Generation:
    """Plan and start the next generation.

    Raises:
        PlanError: there is no legal layout.
        JobFailed: there are checkpoints, but none can be used.
    """
    desk.enter(State.FORMING)
    began = time.monotonic()
    last = desk.last
    chosen = choose(desk, last.plan if last else None)
    number = len(desk.generations) + 1
    go_back(desk)
    source = desk.custody.newest()
    step = step_of(source)
    generation = Generation(number, chosen, desk.cause, desk.planned, step, desk.change_at, step=step)
    if last is not None:
        _follow(desk, generation, last, source)
    desk.generations.append(generation)
    desk.record.event(
        "generation",
        f"generation {number} ({desk.cause}): {chosen.reason}; from {where(source)}",
        gen=number,
        layout=str(chosen.layout),
        workers=list(chosen.ranks),
        spares=list(chosen.spares),
        step=step,
        cause=desk.cause,
        planned=desk.planned,
        detect_s=_detection_s(desk, last),
        source="memory" if isinstance(source, MemorySource) else "start" if source is None else "checkpoint",
    )
    generation.phases["plan"] = time.monotonic() - began
    generation.nodes = tuple(desk.worker(ident).node for ident in chosen.ranks)
    generation.token = f"{desk.ticket.run_id}-{number}"
    desk.record.journal(journal.generation_row(generation))
    _order(desk, generation, source)
    desk.custody.begun(generation, source)
    # In a thread: a large fleet leaves many keys. Of the last generation some rank may still be leaving.
    threading.Thread(target=forget_generations, args=(desk.store, number - 1), daemon=True).start()
    desk.chronicle.account.begin(step, time.monotonic())
    return generation


def _detection_s(desk: Desk, last: Generation | None) -> float:
    """Seconds from the last sign of life to the evidence of the fault that ended the generation before; 0: at once."""
    if desk.planned or last is None or last.silent_since is None or desk.change_at is None:
        return 0.0
    return max(0.0, desk.change_at - last.silent_since)


def _follow(desk: Desk, generation: Generation, last: Generation, source: Source) -> None:
    """Settle what became of the generation before."""
    step = generation.start_step
    desk.chronicle.settle(last, step)
    generation.phases |= last.ending
    if step < last.step:
        text = f"steps {step} to {last.step - 1} are redone from {where(source)}"
        desk.record.event("rollback", text, gen=generation.number, steps_lost=last.step - step)


def _order(desk: Desk, generation: Generation, source: Source) -> None:
    keepers, loaders = desk.staff.keeper_addresses(), desk.staff.loader_handles()
    durable = None if isinstance(source, MemorySource) else source
    number, nodes = generation.number, generation.nodes
    # Longer than a hang may last, so that it is judged by what all ranks say, before a collective gives up.
    timeout_s = 1.5 * desk.job.elastic.hang_s + 5.0
    for rank, ident in enumerate(generation.members):
        order = Order(
            Rendezvous(number, rank, generation.plan.layout, desk.host, desk.store.port, timeout_s),
            generation.token,
            loaders,
            nodes,
            keepers[nodes[rank]],
            generation.start_step,
            source,
            durable,
            strict=number == 1,
            skips=desk.custody.windows,
            gpus=desk.worker(ident).gpus,
        )
        _send(desk, ident, order)


def _send(desk: Desk, ident: str, order: Order) -> None:
    def done(future: Any) -> None:
        error = future.exception()
        if error is not None:
            desk.tell(Gone(ident, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"))

    handle = desk.worker(ident).handle
    handle.run.options(concurrency_group="train").remote(order).future().add_done_callback(done)
