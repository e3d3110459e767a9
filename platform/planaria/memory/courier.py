"""Brings one worker's snapshots to the keepers of other nodes, in the background."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from planaria.memory.buffers import MemoryTooSmall
from planaria.memory.placement import shipments
from planaria.memory.shelf import OWN_BUFFERS, NotHeld, Shelf, Stack
from planaria.memory.table import Table
from planaria.memory.wire import KeeperAddress, KeeperError, KeeperLink
from planaria.state.checksum import DIGEST_BYTES

SHIP_LIMIT_S = 180.0
"""Longest silence of a partner that takes a copy; it may have to allocate the memory first."""

Tell = Callable[[dict[str, Any]], None]


@dataclass
class _Route:
    """To one partner: which entries, and the open connection."""

    chosen: list[int]
    table: Table
    link: KeeperLink


class Courier:
    """Allocates the buffers of one stack, then ships every sealed snapshot; one thread.

    Args:
        ring: gives the keepers that can take copies, this node's included, as they are now.
        tell: told of partners that could not be served.
    """

    def __init__(
        self,
        shelf: Shelf,
        stack: Stack,
        node: str,
        replicas: int,
        ring: Callable[[], Sequence[KeeperAddress]],
        tell: Tell,
    ) -> None:
        self._shelf, self._stack, self._node, self._replicas = shelf, stack, node, replicas
        self._ring, self._tell = ring, tell
        self._sealed: queue.SimpleQueue[tuple[int, int | None] | None] = queue.SimpleQueue()
        self._routes: dict[str, _Route] = {}
        self._unreachable: set[str] = set()
        self._thread = threading.Thread(target=self._run, name=f"courier-{stack.owner}", daemon=True)

    def start(self, strict: bool) -> None:
        """Reserve the partners' memory, then begin.

        Raises:
            KeeperError, MemoryTooSmall: with ``strict``, a partner is gone, or has not enough memory.
        """
        for node, chosen in self._plan().items():
            try:
                self._route(node, chosen)
            except (KeeperError, MemoryTooSmall):
                if strict:
                    raise
        self._thread.start()

    def sealed(self, step: int, complete: int | None) -> None:
        """The snapshot of ``step`` is complete here; of ``complete``, it is known to be so everywhere."""
        self._sealed.put((step, complete))

    def stop(self) -> None:
        """End after what is under way."""
        self._sealed.put(None)

    def _run(self) -> None:
        try:
            for _ in range(1 if self._stack.lean else OWN_BUFFERS):
                self._shelf.grow(self._stack)
            while (item := self._sealed.get()) is not None:
                self._ship(*item)
        except MemoryTooSmall as error:
            self._tell({"t": "memory_short", "owner": self._stack.owner, "problem": str(error)})
        except NotHeld:
            pass  # the generation is over
        finally:
            for route in self._routes.values():
                route.link.close()

    def _plan(self) -> dict[str, list[int]]:
        if self._stack.lean:
            return {}
        ring = sorted(address.node for address in self._ring())
        return shipments(self._stack.table, self._node, ring, self._replicas)

    def _ship(self, step: int, complete: int | None) -> None:
        stack = self._stack
        buffer = stack.buffer_of(step)
        digests = stack.digests(buffer, step)
        for node, chosen in self._plan().items():
            try:
                route = self._route(node, chosen)
                parts = [digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES] for at in route.chosen]
                data = stack.buffers[buffer].data
                runs = [data[start:stop] for start, stop in stack.table.runs(route.chosen)]
                message = {"op": "replica", "gen": stack.generation, "owner": stack.owner, "step": step}
                route.link.call(message | {"complete": complete}, [b"".join(parts), *runs])
                self._unreachable.discard(node)
            except (KeeperError, MemoryTooSmall) as error:
                self._lose(node, str(error))
        if stack.page is not None:
            # Also where a partner failed: training does not wait for a node that may never answer.
            stack.page.replicated = step

    def _route(self, node: str, chosen: list[int]) -> _Route:
        route = self._routes.get(node)
        if route is not None and route.chosen == chosen:
            return route
        address = next(item for item in self._ring() if item.node == node)
        table = self._stack.table.subset(chosen)
        link = KeeperLink(address, SHIP_LIMIT_S)
        message = {"op": "replica_open", "gen": self._stack.generation, "owner": self._stack.owner}
        link.call(message, [table.encoded])
        self._routes[node] = _Route(chosen, table, link)
        return self._routes[node]

    def _lose(self, node: str, problem: str) -> None:
        route = self._routes.pop(node, None)
        if route is not None:
            route.link.close()
        if node not in self._unreachable:
            self._unreachable.add(node)
            self._tell({"t": "unreplicated", "owner": self._stack.owner, "partner": node, "problem": problem})
