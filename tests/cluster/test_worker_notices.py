"""One real worker process: what it answers while its training thread is stuck, and what a SIGTERM does to it."""

from __future__ import annotations

import os
import queue
import signal
from types import SimpleNamespace
from typing import Any, cast

import psutil
import ray

from planaria.config import parse
from planaria.layout import Layout
from planaria.memory.wire import KeeperAddress
from planaria.recipe import Recipe
from planaria.runtime.beacon_server import BeaconServer
from planaria.runtime.fleet import actor_class
from planaria.runtime.groups import Rendezvous, host_store
from planaria.runtime.local_cluster import LocalCluster
from planaria.runtime.outcome import End
from planaria.runtime.worker import Order, Worker, WorkerSpec

LIMIT_S = 60.0
JOB = parse({"model": {"preset": "llava-tiny"}, "train": {"steps": 4, "global_batch": 4}})


def test_a_stuck_worker_shows_its_stacks_and_takes_a_sigterm_for_a_notice(tmp_path) -> None:
    heard: queue.Queue[dict[str, Any]] = queue.Queue()
    with LocalCluster(nodes=1):
        host = ray.util.get_node_ip_address()
        beacon = BeaconServer(host, "secret", lambda _, message: heard.put(message), lambda _: None)
        store = host_store(host)
        spec = WorkerSpec("worker-0", beacon.address, cast(Recipe, None), JOB, str(tmp_path), use_gpu=False)
        worker = actor_class(Worker, concurrency_groups={"train": 1, "control": 4}).options(num_cpus=1).remote(spec)
        pid = ray.get(worker.ready.remote(), timeout=LIMIT_S).pid

        def stacks() -> str:
            return str(ray.get(worker.stacks.options(concurrency_group="control").remote(), timeout=LIMIT_S))

        assert stacks().startswith(f"worker-0, process {pid}: in no generation\n")
        # A generation of two, of which only one ever comes: the training thread waits in C for the other.
        rendezvous = Rendezvous(1, 0, Layout(dp_shard=2), host, store.port, 10 * LIMIT_S)
        loader = SimpleNamespace(build=SimpleNamespace(remote=print))
        keeper = KeeperAddress("here", host, 9, "secret")
        order = Order(rendezvous, "run-1", [loader], ("here", "here"), keeper, 3, None, None, True)
        running = worker.run.options(concurrency_group="train").remote(order)
        word = heard.get(timeout=LIMIT_S)
        assert word == {"t": "phase", "step": 3, "phase": "forming", "gen": 1, "rank": 0}
        head, first, *_ = stacks().split("\n-- ")
        assert head.startswith(f"worker-0, process {pid}: generation 1, step 3, forming, for ")
        assert " (training), thread " in first.splitlines()[0] and "init_process_group" in first

        os.kill(pid, signal.SIGTERM)
        assert heard.get(timeout=LIMIT_S) == {"t": "notice", "why": "SIGTERM"}
        assert ray.wait([running], timeout=1.0)[0] == [], "the generation goes on"
        os.kill(pid, signal.SIGTERM)
        assert heard.get(timeout=LIMIT_S)["t"] == "notice", "every one is told"

        ray.get(worker.abort.options(concurrency_group="control").remote(1), timeout=LIMIT_S)
        ray.get(running, timeout=LIMIT_S)
        ending = heard.get(timeout=LIMIT_S)
        assert (ending["t"], ending["outcome"]["end"]) == ("end", End.ABORTED)
        process = psutil.Process(pid)
        ray.kill(worker)
        process.wait(LIMIT_S)  # whoever must go at once still does
        beacon.close()
