"""The demo's script and its verdict, without Ray."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from planaria.demo import Script, deferred_signals, demo_job, praise, shortfalls, victim


class FakeCluster:
    """Nodes that carry what their names say."""

    def __init__(self, *titles: str) -> None:
        self.nodes = [SimpleNamespace(node_id=f"node{i}-00000000", title=title) for i, title in enumerate(titles)]
        self.killed: list[Any] = []
        self.added = 0

    def processes_of(self, node: Any) -> list[Any]:
        return [SimpleNamespace(cmdline=lambda: node.title.split())]

    def kill_node(self, node: Any) -> None:
        self.nodes.remove(node)
        self.killed.append(node)

    def add_node(self) -> None:
        self.added += 1


def status(step: int, workers: int = 4, generation: int = 1, final: bool = False) -> dict[str, Any]:
    return {"step": step, "workers": workers, "generation": generation, "final": final}


def test_one_node_dies_and_one_joins_once_each():
    cluster, seen, told = FakeCluster(*["ray::Worker"] * 4), [], []
    script = Script(cluster, 100, seen.append, told.append)
    for at in (status(0), status(49), status(50), status(55, 4), status(60, 3, 2), status(65, 3, 2), status(99, 4, 3)):
        script(at)
    assert (len(cluster.killed), cluster.added, len(seen), len(told)) == (1, 1, 7, 2)
    assert "SIGKILL" in told[0]


def test_nothing_is_killed_below_four_workers_or_after_the_end():
    cluster = FakeCluster(*["ray::Worker"] * 4)
    script = Script(cluster, 100, lambda status: None, lambda line: None)
    script(status(60, workers=3))
    script(status(100, final=True))
    assert not cluster.killed


def test_victim_has_a_worker_and_no_loader_if_possible():
    cluster = FakeCluster("ray::Worker ray::Loader", "ray::Worker.run", "raylet")
    assert victim(cluster) is cluster.nodes[1]
    assert victim(FakeCluster("raylet", "ray::Worker ray::Loader")).title == "ray::Worker ray::Loader"
    assert victim(FakeCluster("raylet")).title == "raylet"


def summary(*workers: int, accuracy: float = 0.8, state: str = "finished") -> dict[str, Any]:
    rows = [{"workers": count, "cause": "lost worker-1" if at else "start"} for at, count in enumerate(workers)]
    for row in rows:
        row["recovery_s"] = None if row["cause"] == "start" else 1.25
    score = {"questions": 100, "accuracy": accuracy, "chance": 0.2}
    return {"state": state, "generations": rows, "evaluation": score}


def test_verdict():
    assert shortfalls(summary(4, 3, 4)) == []
    assert "4.0 times chance" in praise(summary(4, 3, 4))
    assert "1.2 s" in praise(summary(4, 3, 4)) or "1.3 s" in praise(summary(4, 3, 4))


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (summary(4, 3, 4, accuracy=0.5), "only 2.50 times chance"),
        (summary(4, 3), "not on 4"),
        (summary(4), "no generation ran on 3"),
        (summary(4, 3, 4, state="failed"), "failed"),
        (summary(4, 3, 4) | {"evaluation": None}, "not scored"),
    ],
)
def test_shortfalls_are_told(result, told):
    assert told in " ".join(shortfalls(result))


def test_the_job_is_part_of_the_package(tmp_path):
    job = demo_job(str(tmp_path), 77)
    assert job.train.steps == 77
    assert job.storage == str(tmp_path)
    assert job.elastic.max_workers == 4


def test_signals_wait_and_the_third_one_does_not(capsys):
    before = signal.getsignal(signal.SIGINT)
    with deferred_signals() as caught:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert caught == [signal.SIGINT, signal.SIGTERM]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert "please wait" in capsys.readouterr().err
