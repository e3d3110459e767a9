"""What the controller tells a worker at awkward moments; no Ray, no peers."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
import torch.distributed as dist

from planaria.config import parse
from planaria.layout import Layout
from planaria.memory.wire import KeeperAddress
from planaria.recipe import Recipe
from planaria.runtime.beacon_server import BeaconServer
from planaria.runtime.groups import Groups, Rendezvous
from planaria.runtime.outcome import End, outcome_of
from planaria.runtime.worker import Order, Worker, WorkerSpec

JOB = parse({"model": {"preset": "llava-tiny"}, "train": {"steps": 4, "global_batch": 4}})
LOADER: Any = SimpleNamespace(build=SimpleNamespace(remote=lambda *_: None))


class Stage:
    """A worker, and what its controller hears."""

    def __init__(self, run_dir: str) -> None:
        self.heard: queue.Queue[dict[str, Any]] = queue.Queue()
        self.beacon = BeaconServer("127.0.0.1", "secret", lambda _, message: self.heard.put(message), lambda _: None)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        no_recipe = cast(Recipe, None)
        self.worker = Worker(WorkerSpec("worker-0", self.beacon.address, no_recipe, JOB, run_dir, use_gpu=False))

    def order(self, generation: int) -> Order:
        rendezvous = Rendezvous(generation, 0, Layout(dp_shard=2), "127.0.0.1", self.store.port, 30.0)
        keeper = KeeperAddress("here", "127.0.0.1", 9, "secret")
        return Order(rendezvous, f"run-{generation}", [LOADER], ("here", "here"), keeper, 0, None, None, True)


@pytest.fixture
def stage(tmp_path, monkeypatch) -> Iterator[Stage]:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    found = Stage(str(tmp_path))
    yield found
    found.worker._notices.close()
    found.worker._beacon.close()  # first: a worker whose line is cut ends its process
    found.beacon.close()


def test_an_abort_that_overtakes_its_order_is_signed_off(stage: Stage) -> None:
    stage.worker.abort(1)
    stage.worker.run(stage.order(1))
    told = stage.heard.get(timeout=10)
    assert (told["t"], told["gen"], told["rank"]) == ("end", 1, 0)
    assert outcome_of(told["outcome"]).end is End.ABORTED


@pytest.mark.parametrize(("told_for", "used"), [(2, ["new"]), (1, [LOADER])])
def test_loaders_that_change_while_the_groups_form_are_used(stage: Stage, told_for: int, used: list[Any]) -> None:
    order = stage.order(2)
    stage.worker.set_loaders(told_for, ["new"])
    feed = stage.worker._open_feed(order, Groups(order.rendezvous, stage.worker.device))
    assert feed._loaders == used
    stage.worker.set_loaders(2, ["newer"])
    assert feed._loaders == ["newer"]


def test_windows_of_an_order_reach_the_loaders_as_numbers_of_batches(stage: Stage) -> None:
    asked: list[int] = []
    loader: Any = SimpleNamespace(build=SimpleNamespace(remote=lambda number, *_: asked.append(number)))
    order = dataclasses.replace(stage.order(1), loaders=[loader], skips=((1, 2), (4, 4)))
    feed = stage.worker._open_feed(order, Groups(order.rendezvous, stage.worker.device))
    feed.ask(0)
    assert asked == [0, 3, 5]
