"""Cables are pulled, packets vanish one way or at random, a link is slow: the job goes on with the same losses.

The default run takes the head's store away and pulls one cable; the rest is in the long form (``make network``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tests.network.cluster import NetworkCluster
from tests.support.command import Command
from tests.support.running import RunningJob
from tests.support.runs import Run, expected_ids, job
from tests.support.undisturbed import undisturbed_losses

from planaria.config import JobConfig

LONG = "PLANARIA_NETWORK" in os.environ
long_form = pytest.mark.skipif(not LONG, reason="long form only: make network")
WORKERS = 3
SILENCE_S = 3.0
SLACK_S = 10.0
"""Two seconds are the aim; machines that share their cores are given more."""


def _config(tmp_path: Path) -> JobConfig:
    return job(
        tmp_path,
        train={"steps": 1_000_000, "global_batch": 6, "micro_batch": 3},
        optim={"lr": 1e-5, "schedule": {"kind": "constant"}},
        elastic={"min_workers": 1, "max_workers": WORKERS, "max_failures": -1, "silence_s": SILENCE_S, "hang_s": 60},
        checkpoint={"every": 50},
    )


@contextmanager
def _trained(cluster: NetworkCluster, config: JobConfig) -> Iterator[RunningJob]:
    """A job that trains on all nodes; afterwards it is stopped, and its losses are compared."""
    head = cluster.network.prefix(0)
    with Command(config, cluster.address, head, cluster.environment) as command:
        running = RunningJob(command.run_dir, lambda: command.ended)
        try:
            running.until(lambda: running.step >= 10 and running.calm() and _size(running) == WORKERS, 120, "training")
            yield running
            assert command.stop() == 143
        except BaseException:
            print(running.excerpt(), command.output[-3000:])
            raise
    running.look()
    run = Run(Path(config.storage))
    losses = run.losses()
    assert sorted(losses) == list(range(running.step))
    undisturbed = undisturbed_losses(config, running.step)
    assert [losses[step] for step in range(running.step)] == pytest.approx(undisturbed, rel=1e-5)
    assert run.ids() == expected_ids(config, 500, running.step)


def _size(running: RunningJob) -> int:
    return len(running.workers_of(running.generation))


def _cut_off(running: RunningJob, host: int, cluster: NetworkCluster, fault: Callable[[int], None]) -> list[int]:
    """Cut ``host`` off; returns its workers once the others train without them."""
    pids = cluster.network.pids(host)
    victims = [member for member, pid in running.living("worker-").items() if pid in pids]
    assert victims
    cut_at, generation = time.time(), running.generation
    fault(host)

    def gone_on() -> bool:
        row = running.steps[-1]
        return row["gen"] > generation and not set(victims) & set(running.workers_of(row["gen"]))

    running.until(gone_on, 60, f"training without {victims}")
    took = running.steps[-1]["time"] - cut_at
    print(f"{fault.__name__}: the others trained again after {took:.2f} s (silence_s is {SILENCE_S})")
    assert took < SILENCE_S + SLACK_S
    return [running.pid_of[member] for member in victims]


def _host_of_rank(running: RunningJob, rank: int, cluster: NetworkCluster) -> int:
    return cluster.host_of(running, running.workers_of(running.generation)[rank])


def _gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _steps_on(running: RunningJob, count: int) -> None:
    seen = running.step
    running.until(lambda: running.step >= seen + count, 120, f"{count} more steps")


def test_the_head_loses_its_store_and_a_node_its_cable_and_both_come_back(
    cluster: NetworkCluster, tmp_path: Path
) -> None:
    """gcs_server is killed and starts again from its files; then a cable is pulled, and plugged in again."""
    with _trained(cluster, _config(tmp_path)) as running:
        restart = cluster.kill_gcs()
        generation = running.generation
        _steps_on(running, 10)
        restart()
        _steps_on(running, 10)
        assert running.generation == generation, "nobody in the generation needs the store"

        host = _host_of_rank(running, 1, cluster)
        fenced = _cut_off(running, host, cluster, cluster.network.pull)
        _steps_on(running, 10)
        assert not any(_gone(pid) for pid in fenced), "nobody could reach them to end them"
        generation = running.generation
        cluster.network.plug(host)
        running.until(lambda: all(_gone(pid) for pid in fenced), 30, "the end of the worker that was given up")
        # A worker is started in its place, which takes the store that was lost.
        running.until(
            lambda: running.generation > generation and running.calm() and _size(running) == WORKERS,
            90,
            "the return of the node",
        )
        _steps_on(running, 5)


@long_form
def test_a_node_that_hears_nothing_is_cut_off(cluster: NetworkCluster, tmp_path: Path) -> None:
    """One-way: what it sends arrives, but no acknowledgement reaches it, so that it sends little more."""
    with _trained(cluster, _config(tmp_path)) as running:
        host = _host_of_rank(running, 0, cluster)
        _cut_off(running, host, cluster, cluster.network.deafen)
        _steps_on(running, 10)
        cluster.network.mend(host)
        _steps_on(running, 10)


@long_form
@pytest.mark.parametrize("fault", ["lossy", "slow"])
def test_a_bad_link_makes_training_slower_and_is_no_reason_to_give_anybody_up(
    cluster: NetworkCluster, tmp_path: Path, fault: str
) -> None:
    """5% of the packets of a node vanish, or its link has 10 Mbit/s."""
    with _trained(cluster, _config(tmp_path)) as running:
        host = _host_of_rank(running, 1, cluster)
        before = dict(running.lost_at)
        if fault == "lossy":
            cluster.network.lose(host, 0.05)
        else:
            cluster.network.shape(host, "10mbit")
        began = time.time()
        _steps_on(running, 30)
        print(f"{fault}: {(time.time() - began) / 30:.3f} s per step")
        assert running.lost_at == before
        cluster.network.mend(host)
        _steps_on(running, 10)
