"""The public entry: an elastic trainer with the conventions of Ray Train."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
from ray.train import Checkpoint, FailureConfig, Result, RunConfig, ScalingConfig, TrainingFailedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from planaria.config import ConfigError, JobConfig, load, parse
from planaria.control import takeover
from planaria.control.controller import Controller
from planaria.control.ticket import CONTROLLER, Ticket
from planaria.data.errors import DataError
from planaria.data.identity import DataIdentity, identity_of
from planaria.engine.facts import model_facts
from planaria.models.choose import job_recipe
from planaria.paths import absolute_paths
from planaria.planner.plan import ModelFacts
from planaria.recipe import Recipe, is_scored
from planaria.runtime.fleet import Scaling, actor_class

POLL_S = 0.25
CONTROLLER_DEATHS = 20
"""A controller that dies this often without having answered in between will not return."""
RETURN_PAUSE_S = 0.5
STOP_LIMIT_S = 120.0
"""Longest wait for the last checkpoint once an end was asked for."""

Watcher = Callable[[dict[str, Any]], None]


class TrainingFailed(TrainingFailedError):
    """The job ended without finishing; the message is the controller's diagnosis."""


class TrainingStopped(RuntimeError):
    """The job was asked to end before its last step; the message says which checkpoint it goes on from."""

    def __init__(self, message: str, by: str | None = None) -> None:
        super().__init__(message)
        self.by = by
        """``"Ctrl-C"`` or ``"SIGTERM"``."""


class ElasticTrainer:
    """Trains one job on a Ray cluster, through the loss and arrival of nodes.

    ``ElasticTrainer(job, scaling_config=ray.train.ScalingConfig(num_workers=(2, 8), use_gpu=True),
    run_config=ray.train.RunConfig(name=..., storage_path=...)).fit()`` returns a ``ray.train.Result``.

    Args:
        job: a :class:`JobConfig`, the path of its YAML file, or a plain mapping.
        scaling_config: number of workers, or (least, most); GPUs; resources per worker. Default: the job's
            ``elastic`` and ``resources`` sections. If it is given, its ``num_workers`` counts (Ray's default is 1).
        run_config: ``name``, ``storage_path``, ``failure_config.max_failures`` (failures in a row without
            progress; -1: no limit; 0, Ray's default, leaves the job's own) and
            ``checkpoint_config.num_to_keep`` override the job's own.
        recipe: model, data and loss (:class:`planaria.recipe.Recipe`); default: the platform's own
            for what the job's ``model`` and ``data`` sections describe.
        watch: called with the controller's status a few times per second, e.g. to draw it.
    """

    def __init__(
        self,
        job: JobConfig | str | Path | dict[str, Any],
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        *,
        recipe: Recipe | None = None,
        watch: Watcher | None = None,
    ) -> None:
        if isinstance(job, (str, Path)):
            job = load(job)
        elif isinstance(job, dict):
            job = parse(job)
        _refuse_unsupported(scaling_config, run_config)
        self._scaling_config = scaling_config
        self.job = absolute_paths(_merged(job, scaling_config, run_config))
        self.recipe: Recipe = recipe if recipe is not None else job_recipe(self.job)
        self.run_dir = str(Path(self.job.storage) / self.job.name)
        self._watch = watch
        self.summary: dict[str, Any] = {}
        self.data: DataIdentity | None = None
        """Which samples the job reads, as found by :meth:`preflight`."""

    def preflight(self) -> ModelFacts:
        """Check model, data, layout and storage before any process starts.

        Raises:
            ConfigError, DataError, ShardingError: what is wrong, where, and how to mend it.
        """
        facts = model_facts(self.recipe, self.job)
        self.data = identity_of(self.recipe.dataset("train"))
        if self.job.evaluate.samples and is_scored(self.recipe):
            self.recipe.dataset("val")
        try:
            Path(self.run_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"storage: {self.run_dir!r} cannot be created ({error.strerror}); choose another"
            ) from None
        return facts

    def fit(self) -> Result:
        """Run the job to its end.

        Ctrl-C and SIGTERM end it at the next step boundary with a checkpoint; a second Ctrl-C at once.

        Raises:
            ConfigError, DataError: before anything was started.
            TrainingFailed: with the diagnosis; the run directory holds the details.
            TrainingStopped: it was asked to end; the message names the checkpoint.
        """
        facts = self.preflight()
        started_ray = not ray.is_initialized()
        if started_ray:
            ray.init(logging_level=logging.WARNING, log_to_driver=False)
        try:
            self.summary = self._run(facts)
        finally:
            if started_ray:
                ray.shutdown()
        if self.summary["state"] == "failed":
            raise TrainingFailed(self.summary["error"])
        if self.summary["state"] == "stopped":
            raise TrainingStopped(stop_message(self.summary, self.job.train.steps), self.summary["stopped_by"])
        return result_of(self.summary)

    def _run(self, facts: ModelFacts) -> dict[str, Any]:
        takeover.take_over(self.run_dir)
        ticket = Ticket.draw(self.run_dir)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        controller_class = actor_class(Controller, num_cpus=0, concurrency_groups={"job": 1, "talk": 2})
        # Detached, so that it can end the job in good order when this process is gone; Ray starts it again, with the
        # same arguments, when it is killed.
        controller = controller_class.options(
            name=CONTROLLER, namespace=ticket.namespace, lifetime="detached", max_restarts=-1, scheduling_strategy=here
        ).remote(
            self.job, self.recipe, facts, self.run_dir, _scaling(self._scaling_config, self.job), ticket, self.data
        )
        try:
            return self._attend(controller)
        except ray.exceptions.RayError as error:
            raise TrainingFailed(
                f"the controller failed; the same command goes on from the last checkpoint. Ray says: {error}"
            ) from error
        finally:
            takeover.sweep(ticket.namespace)

    def _attend(self, controller: Any) -> dict[str, Any]:
        finished = controller.run.options(concurrency_group="job").remote()
        asked_at: float | None = None
        asked: Any = None
        deaths = 0
        with _signals() as caught:
            while True:
                try:
                    done, _ = ray.wait([finished], timeout=POLL_S)
                    if done:
                        try:
                            summary: dict[str, Any] = ray.get(finished)
                        except (ray.exceptions.ActorDiedError, ray.exceptions.ActorUnavailableError):
                            deaths += 1
                            if deaths > CONTROLLER_DEATHS:
                                raise
                            # Its processes train on; the one that Ray starts in its place takes them up.
                            time.sleep(RETURN_PAUSE_S)
                            finished = controller.run.options(concurrency_group="job").remote()
                            asked = None  # whatever it had heard died with it
                            continue
                        self._show(controller, final=True)
                        return summary
                    deaths = 0 if self._show(controller) else deaths
                except KeyboardInterrupt:
                    caught.append("Ctrl-C")
                if caught and (asked is None or _failed(asked)):
                    asked_at = asked_at or time.monotonic()
                    asked = controller.stop.options(concurrency_group="talk").remote(caught[0])
                elif len(caught) > 1 or (asked_at and time.monotonic() - asked_at > STOP_LIMIT_S):
                    how = "at once" if len(caught) > 1 else f"after waiting {STOP_LIMIT_S:.0f} s for the step to end"
                    raise TrainingStopped(f"ended {how}, without a last checkpoint", caught[0])

    def _show(self, controller: Any, final: bool = False) -> bool:
        """Whether the controller answers; that it is asked is the sign that this process lives."""
        try:
            status = ray.get(controller.status.options(concurrency_group="talk").remote(), timeout=5)
        except ray.exceptions.RayError:
            return False
        if self._watch is not None:
            self._watch(status | {"final": final})
        return True


def _failed(call: Any) -> bool:
    """Whether a call to an actor has come to nothing, as when the actor died before it answered."""
    done, _ = ray.wait([call], timeout=0)
    try:
        ray.get(done)
    except ray.exceptions.RayError:
        return True
    return False


def stop_message(summary: dict[str, Any], total: int) -> str:
    """How far a stopped job came, and where it goes on."""
    step = summary["checkpoint_step"]
    where = "there is no checkpoint, so the same command begins anew"
    if step is not None:
        where = f"the same command goes on from the checkpoint of step {step}"
    return f"stopped after {summary['steps']} of {total} steps; {where}"


def result_of(summary: dict[str, Any]) -> Result:
    """A ``ray.train.Result`` for a job's summary."""
    run_dir = Path(summary["run_dir"])
    folder = summary["checkpoint_path"]
    metrics = dict(summary["metrics"]) | {"evaluation": summary["evaluation"], "generations": summary["generations"]}
    checkpoint = Checkpoint(folder) if folder is not None and Path(folder).exists() else None
    return Result(metrics=metrics, checkpoint=checkpoint, error=None, path=str(run_dir))


def _scaling(config: ScalingConfig | None, job: JobConfig) -> Scaling:
    """What a worker occupies: as the scaling config says, else as the job's ``resources`` say; Ray is connected."""
    if config is not None:
        given: Any = config.resources_per_worker or {}
        resources = {name: float(amount) for name, amount in given.items()}
        if config.use_gpu:
            resources.setdefault("GPU", 1.0)
        resources.setdefault("CPU", 1.0)
        return Scaling(bool(config.use_gpu), resources)
    wanted = job.resources
    use_gpu = wanted.device == "cuda" or (wanted.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
    return Scaling(use_gpu, {"CPU": wanted.cpus} | ({"GPU": wanted.gpus} if use_gpu else {}))


def _refuse_unsupported(scaling: ScalingConfig | None, run: RunConfig | None) -> None:
    """Options of Ray Train that would be ignored are refused: nobody shall believe that they work."""
    ignored = [
        f"{name}.{option}"
        for name, config, options in (
            ("scaling_config", scaling, ("accelerator_type", "label_selector", "topology", "use_tpu")),
            ("run_config", run, ("storage_filesystem", "callbacks", "worker_runtime_env")),
        )
        for option in options
        if config is not None and getattr(config, option, None)
    ]
    if ignored:
        raise ConfigError(f"{', '.join(ignored)}: not supported yet; leave it out")


def _merged(job: JobConfig, scaling: ScalingConfig | None, run: RunConfig | None) -> JobConfig:
    """The job with what Ray Train's configs say; checked again as a whole."""
    tree = job.model_dump(mode="json")
    if scaling is not None and scaling.num_workers is not None:
        workers = scaling.num_workers
        least, most = workers if isinstance(workers, tuple) else (workers, workers)
        tree["elastic"] |= {"min_workers": least, "max_workers": most}
    if run is not None:
        if run.name:
            tree["name"] = run.name
        if run.storage_path:
            tree["storage"] = str(run.storage_path)
        # Ray's default forgives nothing, which here nobody means who did not say so.
        if run.failure_config is not None and run.failure_config != FailureConfig():
            tree["elastic"]["max_failures"] = run.failure_config.max_failures
        if run.checkpoint_config is not None and run.checkpoint_config.num_to_keep:
            tree["checkpoint"]["keep_last"] = run.checkpoint_config.num_to_keep
    return parse(tree, "scaling_config/run_config")


@contextlib.contextmanager
def _signals() -> Iterator[list[str]]:
    """Collect SIGINT and SIGTERM instead of dying of them; the list holds what came."""
    caught: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    names = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
    before = {number: signal.getsignal(number) for number in names}
    for number in names:
        signal.signal(number, lambda received, _frame: caught.append(names[signal.Signals(received)]))
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


__all__ = ["ConfigError", "DataError", "ElasticTrainer", "TrainingFailed", "TrainingStopped"]
