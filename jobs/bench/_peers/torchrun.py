"""torchrun elastic: N agents, each a process group of its own, over one c10d rendezvous that outlives them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from datetime import timedelta
from typing import Any

import psutil
from torch.distributed import TCPStore

from _peers import fault
from _peers.work import Work

BEST = {
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 3,
    "last_call_timeout": 3,
}
"""A lost agent is noticed after 3 s (default: 15 s); latecomers are waited for 3 s (default: 30 s)."""
MONITOR_S = 0.1
BEST_ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""By default torch 2.13 keeps one store for all rounds, and the new workers first dial the dead ones' addresses that
they find there: the first restart fails and a second one is needed."""


def settings(stock: bool) -> dict[str, Any]:
    """What is set, for the report."""
    rest = {
        "nnodes": "1:N",
        "max_restarts": 20,
        "data": "the same batches, built in the training process",
        "rendezvous": "c10d, store outside of the agents",
        "checkpoint": "torch.distributed.checkpoint to a shared local folder, no fsync",
    }
    if stock:
        return rest | {"keep_alive": "default, 5 s x 3", "last_call_timeout": "default, 30 s", "gloo_timeout_s": 1800}
    return rest | BEST | BEST_ENV | {"monitor_interval": MONITOR_S, "gloo_timeout_s": 60}


def run(work: Work) -> None:
    """Start the agents, kill one with its worker, and see the job through."""
    # The store outlives every agent, as the rendezvous host of a well-kept cluster does.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    agents = [_agent(work, store.port) for _ in range(work.nodes)]
    try:
        fault.await_step(work, lambda: _alive(agents) and fault.steps_completed(work))
        victim = fault.last_rank(work)
        agent = next(a for a in agents if victim["pid"] in {p.pid for p in _processes(a)})
        agents.remove(agent)
        fault.strike(work, _processes(agent), victim)
        agent.wait()
        for survivor in agents:
            if survivor.wait():
                raise RuntimeError(f"an agent ended with exit code {survivor.returncode}")
    finally:
        for agent in agents:
            fault.kill(_processes(agent))
            agent.wait()


def _agent(work: Work, port: int) -> subprocess.Popen[bytes]:
    conf = {"is_host": 0} | ({} if work.stock else BEST)
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(f"--nnodes=1:{work.nodes}", "--nproc-per-node=1", "--max-restarts=20", "--local-addr=127.0.0.1"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id=bench{port}"),
        "--rdzv-conf=" + ",".join(f"{key}={value}" for key, value in conf.items()),
        *([] if work.stock else [f"--monitor-interval={MONITOR_S}"]),
        *("-m", "_peers.torchrun_script", work.as_json()),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({} if work.stock else BEST_ENV)
    return subprocess.Popen(command, start_new_session=True, cwd=work.folder, env=environment)


def _alive(agents: list[subprocess.Popen[bytes]]) -> bool:
    ended = [agent.returncode for agent in agents if agent.poll() is not None]
    if ended:
        raise RuntimeError(f"an agent ended before the fault, exit code {ended[0]}")
    return True


def _processes(agent: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The agent and its worker, which is in a session of its own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(agent.pid)
        return [process, *process.children(recursive=True)]
    return []
