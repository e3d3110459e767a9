"""Brings one worker's snapshots to the keepers of other nodes, in the background."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from planaria.memory.buffers import MemoryTooSmall
from planaria.memory.placement import shipments
from planaria.memory.shelf import OWN_BUFFERS, Shelf, Stack
from planaria.memory.table import Table
from planaria.memory.wire import Bytes, KeeperAddress, KeeperError, KeeperLink, PeerGone
from planaria.state.checksum import DIGEST_BYTES

OPEN_S = 10.0
"""Longest wait for a partner to agree to take copies."""
SHIP_LIMIT_S = 180.0
"""Longest silence of a partner that takes a copy; it may have to allocate the memory first. One that the controller
has given up is cut off at once, see :meth:`Courier.ring_changed`."""
AGAIN_S = 5.0
"""Pause after a failure, of a partner or to allocate memory, before the next try."""
SHORT_S = 10.0
"""A lack of memory that lasts so long is told; it may be that of the generation before, which is given up soon."""

Tell = Callable[[dict[str, Any]], None]


@dataclass
class _Route:
    """To one partner: which entries, and the open connection."""

    chosen: list[int]
    table: Table
    link: KeeperLink


class Courier:
    """Allocates the buffers of one stack, and ships every sealed snapshot; one thread.

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
        self._stopped = False
        self._routes: dict[str, _Route] = {}
        self._unreachable: set[str] = set()
        self._not_before: dict[KeeperAddress, float] = {}
        self._short_since: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"courier-{stack.owner}", daemon=True)

    def start(self, strict: bool) -> None:
        """Begin; with ``strict``, once the partners have reserved the memory for copies.

        Raises:
            KeeperError, MemoryTooSmall: with ``strict``, a partner is gone, or has not enough memory.
        """
        if strict:
            try:
                self._reserve()
            except KeeperError as error:
                # Not as PeerGone: to the worker that asks, it is not this keeper that is gone.
                raise KeeperError(str(error)) from error
        self._thread.start()

    def sealed(self, step: int, complete: int | None) -> None:
        """The snapshot of ``step`` is complete here; of ``complete``, it is known to be so everywhere."""
        self._sealed.put((step, complete))

    def ring_changed(self) -> None:
        """Give up partners that are no longer in the ring; from any thread."""
        ring = self._ring()
        for route in list(self._routes.values()):
            if route.link.address not in ring:
                route.link.channel.cut()

    def stop(self) -> None:
        """End after what is under way."""
        self._stopped = True
        self._sealed.put(None)

    def _reserve(self) -> None:
        try:
            for address, chosen in self._plan():
                self._route(address, chosen)
        except (KeeperError, MemoryTooSmall):
            self._close_routes()
            raise

    def _run(self) -> None:
        try:
            with contextlib.suppress(KeeperError, MemoryTooSmall):  # told when there is something to send
                self._reserve()
            while True:
                short = self._allocate()
                try:
                    item = self._sealed.get(timeout=AGAIN_S if short else None)
                except queue.Empty:
                    continue
                if item is None:
                    return
                self._ship(*item)
        except Exception as error:
            if not self._stopped and self._shelf.holds(self._stack):
                self._tell({"t": "courier_failed", "owner": self._stack.owner, "problem": repr(error)})
        finally:
            self._close_routes()

    def _allocate(self) -> bool:
        """Allocate the buffers that are missing; returns whether there was too little memory."""
        try:
            while self._shelf.grow(self._stack, 1 if self._stack.lean else OWN_BUFFERS):
                pass
        except MemoryTooSmall as error:
            now = time.monotonic()
            self._short_since = self._short_since or now
            if now - self._short_since > SHORT_S:
                self._short_since = float("inf")  # told once
                self._tell({"t": "memory_short", "owner": self._stack.owner, "problem": str(error)})
            return True
        return False

    def _plan(self) -> list[tuple[KeeperAddress, list[int]]]:
        """Partners as they are now, and the entries that each is to be sent."""
        if self._stack.lean:
            return []
        ring = {address.node: address for address in self._ring()}
        found = shipments(self._stack.table, self._node, sorted(ring), self._replicas)
        return [(ring[node], chosen) for node, chosen in found.items()]

    def _ship(self, step: int, complete: int | None) -> None:
        stack = self._stack
        buffer = stack.buffer_of(step)
        digests = stack.digests(buffer, step)
        message = {"op": "replica", "gen": stack.generation, "owner": stack.owner, "step": step, "complete": complete}
        plan = self._plan()
        self._close_routes(keep=[address for address, _ in plan])
        for address, chosen in plan:
            if time.monotonic() < self._not_before.get(address, 0.0):
                continue
            try:
                parts = [digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES] for at in chosen]
                data = stack.buffers[buffer].data
                runs = [data[start:stop] for start, stop in stack.table.runs(chosen)]
                self._send(address, chosen, message, [b"".join(parts), *runs])
                self._unreachable.discard(address.node)
            except (KeeperError, MemoryTooSmall) as error:
                self._lose(address, str(error))
        page = stack.page
        if page is not None:
            # Also where a partner failed: training does not wait for a node that may never answer.
            page.replicated = step

    def _send(
        self, address: KeeperAddress, chosen: list[int], message: dict[str, Any], payload: Sequence[Bytes]
    ) -> None:
        used = address.node in self._routes
        try:
            self._route(address, chosen).link.call(message, payload)
        except PeerGone:
            # The connection may have broken long ago, without anybody noticing, and the partner be well.
            if not used or address not in self._ring():
                raise
            self._close_routes(keep=[other for other in self._ring() if other != address])
            self._route(address, chosen).link.call(message, payload)

    def _route(self, address: KeeperAddress, chosen: list[int]) -> _Route:
        route = self._routes.get(address.node)
        if route is not None and route.chosen == chosen:
            return route
        if route is not None:
            del self._routes[address.node]
            route.link.close()
        table = self._stack.table.subset(chosen)
        link = KeeperLink(address, OPEN_S)
        try:
            message = {"op": "replica_open", "gen": self._stack.generation, "owner": self._stack.owner}
            link.call(message, [table.encoded])
        except (KeeperError, MemoryTooSmall):
            link.close()
            raise
        link.channel.limit(SHIP_LIMIT_S)
        self._routes[address.node] = _Route(chosen, table, link)
        return self._routes[address.node]

    def _lose(self, address: KeeperAddress, problem: str) -> None:
        self._not_before[address] = time.monotonic() + AGAIN_S
        route = self._routes.pop(address.node, None)
        if route is not None:
            route.link.close()
        if address.node not in self._unreachable and not self._stopped:
            self._unreachable.add(address.node)
            message = {"t": "unreplicated", "owner": self._stack.owner, "partner": address.node, "problem": problem}
            self._tell(message)

    def _close_routes(self, keep: Sequence[KeeperAddress] = ()) -> None:
        for node, route in list(self._routes.items()):
            if route.link.address not in keep:
                del self._routes[node]
                route.link.close()
