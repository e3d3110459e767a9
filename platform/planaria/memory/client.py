"""What the controller asks of all keepers at once."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from planaria.memory.coverage import Holding, newest_complete
from planaria.memory.recall import MemorySource
from planaria.memory.table import Table
from planaria.memory.wire import KeeperAddress, KeeperError, KeeperLink

T = TypeVar("T")
ANSWER_S = 2.0
"""A keeper that takes longer counts as unable to help."""


def newest_in_memory(keepers: Iterable[KeeperAddress]) -> MemorySource | None:
    """The newest state that the keepers that answer hold completely; they learn of each other as a ring, too."""
    keepers = list(keepers)
    holdings: list[Holding] = []
    tables: dict[str, Table] = {}
    ring = _ring(keepers)
    for found, described in at_once(keepers, lambda link: _inventory(link, ring)).values():
        holdings += found
        tables |= described
    chosen = newest_complete(holdings, tables)
    if not chosen:
        return None
    return MemorySource(
        chosen[0].generation,
        chosen[0].step,
        tuple(chosen),
        {holding.table: tables[holding.table] for holding in chosen},
        {keeper.node: keeper for keeper in keepers},
    )


def announce_ring(keepers: Sequence[KeeperAddress]) -> None:
    """Tell every keeper which others can take copies."""
    ring = _ring(keepers)
    at_once(keepers, lambda link: link.call({"op": "ring", **ring}))


def forget(keepers: Sequence[KeeperAddress], below: int, keep: int | None = None, step: int | None = None) -> None:
    """Have everything of generations before ``below`` dropped, but of ``keep`` the state of ``step`` (or all)."""
    at_once(keepers, lambda link: link.call({"op": "forget", "below": below, "keep": keep, "step": step}))


def usage(keepers: Sequence[KeeperAddress]) -> Mapping[str, dict[str, int]]:
    """Bytes ``used`` and ``free`` of every node's shared memory."""
    answers: Mapping[str, dict[str, Any]] = at_once(keepers, lambda link: link.call({"op": "stat"}))
    return answers


def at_once(keepers: Sequence[KeeperAddress], ask: Callable[[KeeperLink], T]) -> dict[str, T]:
    """Answers of all keepers, by node; those that do not answer in time are missing."""
    answers: dict[str, T] = {}

    def one(address: KeeperAddress) -> None:
        with contextlib.suppress(KeeperError, OSError):
            link = KeeperLink(address, ANSWER_S)
            try:
                answers[address.node] = ask(link)
            finally:
                link.close()

    threads = [threading.Thread(target=one, args=(keeper,), daemon=True) for keeper in keepers]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + ANSWER_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(answers)


def _ring(keepers: Iterable[KeeperAddress]) -> dict[str, Any]:
    # Announcements travel in parallel: the time tells the keeper which one is newer.
    rows = [[keeper.node, keeper.host, keeper.port] for keeper in keepers]
    return {"keepers": rows, "as_of": time.monotonic_ns()}


def _inventory(link: KeeperLink, ring: dict[str, Any]) -> tuple[list[Holding], dict[str, Table]]:
    answer = link.call({"op": "inventory", **ring})
    tables = {name: Table.decode(link.channel.receive_bytes(size)) for name, size in answer["tables"]}
    node = link.address.node
    rows = [
        Holding(node, owner, replica, generation, step, table, path)
        for owner, replica, generation, step, table, path in answer["holdings"]
    ]
    return rows, tables
