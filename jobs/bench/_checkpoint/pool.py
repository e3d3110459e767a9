"""Rank processes that carry out, all at the same time, what they are told."""

from __future__ import annotations

import secrets
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any


class Absent(Exception):
    """A contender that could not be measured; the message is the reason."""


@dataclass
class Rank:
    """What a rank process is, and what it keeps between two calls."""

    rank: int
    world: int
    kept: dict[str, Any] = field(default_factory=dict)


class Pool:
    """``world`` processes with a default process group on gloo."""

    def __init__(self, world: int, folder: Path, environment: Mapping[str, str]) -> None:
        key = secrets.token_bytes(16)
        address = str(folder / f"pool-{secrets.token_hex(4)}")
        store = folder / f"store-{secrets.token_hex(4)}"
        self._log = folder / f"{Path(address).name}.log"
        with Listener(address, "AF_UNIX", backlog=world, authkey=key) as listener, self._log.open("wb") as log:
            self._processes = [
                subprocess.Popen(
                    [sys.executable, "-m", "_checkpoint", str(rank), str(world), address, str(store)],
                    env={**environment, "BENCH_POOL_KEY": key.hex()},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
                for rank in range(world)
            ]
            found = {}
            for _ in range(world):
                connection = listener.accept()
                found[connection.recv()] = connection
            self._connections: list[Connection] = [found[rank] for rank in range(world)]

    def run(self, function: Callable[..., Any], *arguments: Any, limit_s: float = 120.0) -> list[Any]:
        """``function(rank, *arguments)`` on every rank, at once; the results in order of rank.

        Raises:
            Absent: it failed on a rank, or did not end in time. The pool cannot be used any more after the latter.
        """
        for rank, connection in enumerate(self._connections):
            try:
                connection.send((function, arguments))
            except OSError:
                raise Absent(f"rank {rank} died") from None
        answers = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(limit_s):
                raise Absent(f"rank {rank} did not answer within {limit_s:.0f} s")
            try:
                answers.append(connection.recv())
            except EOFError:
                raise Absent(f"rank {rank} died") from None
        for problem, _ in answers:
            if problem is not None:
                raise Absent(problem)
        return [answer for _, answer in answers]

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def serve(rank: int, world: int, address: str, store: str, key: bytes) -> None:
    """A rank process: until the other end is closed."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with Client(address, "AF_UNIX", authkey=key) as connection:
        connection.send(rank)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        me = Rank(rank, world)
        while True:
            try:
                function, arguments = connection.recv()
            except EOFError:
                return
            try:
                answer = (None, function(me, *arguments))
            except BaseException as error:
                traceback.print_exc()
                answer = (f"rank {rank}: {type(error).__name__}: {str(error).strip().splitlines()[-1:]}", None)
            connection.send(answer)
