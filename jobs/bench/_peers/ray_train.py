"""Ray Train elastic: ``TorchTrainer`` with a range of workers, on the same local cluster as Planaria."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

from _peers import fault
from _peers.work import Trace, Work

BEST = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "5",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""Faster polls of the workers (default 2 s), a shorter wait for places that are gone (default 60 s), and a lost
node noticed after about 4 s (defaults: every 3 s, 10 s time-out, 5 failures)."""


def settings(stock: bool) -> dict[str, Any]:
    """What is set, for the report."""
    rest = {
        "num_workers": "(1, N)",
        "max_failures": 20,
        "data": "the same batches, built in the training process",
        "checkpoint": "torch.distributed.checkpoint to a shared local folder, no fsync, NO_UPLOAD; report() only then",
    }
    if stock:
        return rest | {"ray": "all defaults"}
    return rest | BEST | {"gloo_timeout_s": 60}


def loop(config: dict[str, Any]) -> None:
    """``train_loop_per_worker``: resumes from ``get_checkpoint()``, reports with every checkpoint."""
    import ray.train
    from ray.train import Checkpoint
    from ray.train.v2.api.report_config import CheckpointUploadMode

    from _peers.fsdp2 import Trainer

    work = Work(**config)
    context = ray.train.get_context()
    trace = Trace(work, context.get_world_rank(), context.get_world_size())
    trainer = Trainer(work)
    last = ray.train.get_checkpoint()
    if last is not None:
        trainer.load(last.path)
    while trainer.steps_done < work.steps:
        loss = trainer.step()
        trace.step(trainer.steps_done, loss)
        if trainer.steps_done % work.checkpoint_every == 0 or trainer.steps_done == work.steps:
            folder = work.path / "ray_train" / "bench" / f"step-{trainer.steps_done:06d}"
            trainer.save(folder)
            # Written where it stays: nothing is copied again.
            ray.train.report(
                {"loss": loss},
                checkpoint=Checkpoint(str(folder)),
                checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
            )


def run(work: Work) -> None:
    """Start the cluster, train, kill the node of the last rank, and see the job through."""
    if not work.stock:
        os.environ.update(BEST)
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from _peers.cluster import local_cluster

    workers: Any = (1, work.nodes)  # Ray documents the range, its annotation does not
    with local_cluster(work.nodes) as cluster:
        trainer = TorchTrainer(
            loop,
            train_loop_config=json.loads(work.as_json()),
            torch_config=TorchConfig(backend="gloo", timeout_s=1800 if work.stock else 60),
            scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(
                name="bench",
                storage_path=str(work.path / "ray_train"),
                failure_config=FailureConfig(max_failures=20),
                checkpoint_config=CheckpointConfig(num_to_keep=2),
            ),
        )

        if work.outages:
            return fault.endure(work, cluster, trainer.fit, lambda: fault.steps_completed(work))

        def inject() -> None:
            fault.await_step(work, lambda: fault.steps_completed(work))
            fault.strike_node(work, cluster, fault.last_rank(work))

        if work.kill_after:
            threading.Thread(target=inject, daemon=True).start()
        trainer.fit()
