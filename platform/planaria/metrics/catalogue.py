"""Every metric that a job exports, in one place: what dashboards, rules and the documentation are made from. Pure.

Names follow Prometheus' conventions: base units, ``_total`` for counters. Labels are bounded: every series has ``run``
(the job's name); ``rank`` and ``node`` are those of the generation that trains, so their series end with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from planaria.observe.goodput import CLASSES

PREFIX = "planaria_"
RUN = "run"
STEP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
RECOVERY_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 1800.0)
SAVE_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 1800.0)

WHOLE = "whole"
"""The ``phase`` of what is no part but the whole: a step, or a recovery."""
STEP_PHASES = (WHOLE, "data", "agree", "step", "reduce", "update", "keep", "checkpoint")
RECOVERY_PHASES = (WHOLE, "detect", "abort", "plan", "form", "build", "restore", "first_step")
FAULT_CAUSES = ("lost", "hang", "error", "replicas", "numerics")
RESIZE_CAUSES = ("resize", "drain", "straggler")
WORKER_STATES = ("starting", "training", "spare")
NODE_STATES = ("staying", "leaving", "quarantined")
SKIP_REASONS = ("overflow", "not_finite")
MEMORY_TROUBLES = ("unreplicated", "courier_failed", "memory_short", "memory_damaged")
STATES = (
    "waiting",
    "forming",
    "running",
    "resizing",
    "draining",
    "recovering",
    "stopping",
    "stopped",
    "finished",
    "failed",
)
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


class Kind(StrEnum):
    """Types of metrics, by Prometheus' names."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: as it is queried, but for a histogram, to which ``_bucket``, ``_sum`` and ``_count`` are added.
        kind: counters only grow, also through recoveries and the loss of the controller.
        help: what it says, for a person.
        unit: of its values; empty for plain numbers.
        labels: beside ``run``, which every series has.
        values: what a label can be, where that is known.
        buckets: upper bounds of a histogram, without infinity.
        mirrored: whether Ray's own metrics show it too, as ``ray_<name>``.
    """

    name: str
    kind: Kind
    help: str
    unit: str = ""
    labels: tuple[str, ...] = ()
    values: tuple[tuple[str, tuple[str, ...]], ...] = ()
    buckets: tuple[float, ...] = ()
    mirrored: bool = False


def _gauge(
    name: str, text: str, *labels: str, unit: str = "", mirrored: bool = False, **values: Iterable[str]
) -> Metric:
    return Metric(PREFIX + name, Kind.GAUGE, text, unit, labels, _known(values), mirrored=mirrored)


def _counter(name: str, text: str, *labels: str, unit: str = "", **values: Iterable[str]) -> Metric:
    return Metric(PREFIX + name, Kind.COUNTER, text, unit, labels, _known(values))


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str, **values: Iterable[str]) -> Metric:
    return Metric(PREFIX + name, Kind.HISTOGRAM, text, "seconds", labels, _known(values), buckets)


def _known(values: dict[str, Iterable[str]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple((label, tuple(known)) for label, known in values.items())


METRICS: dict[str, tuple[Metric, ...]] = {
    "The job": (
        _gauge("run_active", "1 while the job is neither finished, stopped nor failed", mirrored=True),
        _gauge("state", "1 for the state that the job is in, 0 for the others", "state", state=STATES),
        _gauge("start_timestamp_seconds", "When the job began, Unix time", unit="seconds"),
        _gauge("last_step_timestamp_seconds", "When the newest step was reported, Unix time", unit="seconds"),
        _gauge("scrape_timestamp_seconds", "The controller's clock at the scrape, Unix time", unit="seconds"),
    ),
    "Training": (
        _gauge("step", "Steps done in the state that counts; falls when steps are undone", mirrored=True),
        _gauge("steps_planned", "Steps that the job is to do"),
        _counter("steps_total", "Steps executed, those done again included"),
        _counter("steps_undone_total", "Steps that a rollback undid, to be done again"),
        _counter("skipped_steps_total", "Steps that changed nothing", "reason", reason=SKIP_REASONS),
        _counter("samples_total", "Samples consumed, those of steps done again included"),
        _counter("tokens_total", "Input tokens consumed, padding left out"),
        _counter("target_tokens_total", "Tokens that the loss was taken over"),
        _gauge("tokens_per_second", "Input tokens per second of stepping, over the last steps", mirrored=True),
        _gauge("loss", "Mean loss per target of the newest step", mirrored=True),
        _gauge("gradient_norm", "Norm of the gradient before clipping, newest step"),
        _gauge("learning_rate", "Learning rate of the newest step"),
        _gauge("loss_scale", "Factor on the loss, where there is one (fp16)"),
        _histogram(
            "step_seconds",
            "Time of a step on rank 0: the whole, and its phases, which add up to it",
            STEP_BUCKETS,
            "phase",
            phase=STEP_PHASES,
        ),
    ),
    "Ranks": (
        _gauge("rank_step_seconds", "Time of the rank's newest step", "rank", "node", unit="seconds"),
        _gauge(
            "rank_compute_seconds",
            "What the rank itself needs for a step, waits for others left out; where it is measured",
            "rank",
            "node",
            unit="seconds",
        ),
        _gauge("rank_data_wait_seconds", "Wait for the batch of the newest step", "rank", "node", unit="seconds"),
        _gauge("rank_loader_queue", "Batches that were ready before they were needed", "rank", "node"),
        _gauge(
            "rank_memory_bytes",
            "Memory of the rank's process: resident, and allocated on its device",
            "rank",
            "node",
            "kind",
            unit="bytes",
            kind=("resident", "device"),
        ),
        _gauge("rank_last_step", "The newest step that the rank has completed", "rank", "node"),
        _counter(
            "wire_bytes_total",
            "Payload that rank 0 sent for sums of gradients between replicas (native engine)",
            unit="bytes",
        ),
    ),
    "Elasticity": (
        _gauge("generation", "Number of the newest generation", mirrored=True),
        _gauge("layout_info", "1, with the layout of the newest generation as a label", "layout"),
        _gauge("layout_degree", "Degree of the newest layout along an axis", "axis", axis=AXES),
        _gauge("workers", "Workers by what they do", "state", mirrored=True, state=WORKER_STATES),
        _gauge("workers_wanted", "Most workers that the job would use"),
        _gauge("nodes", "Nodes with places for workers", "state", state=NODE_STATES),
        _counter("processes_lost_total", "Processes lost", "kind", kind=("worker", "loader", "keeper", "standby")),
        _counter("faults_total", "Faults that ended a generation"),
        _counter("recoveries_total", "Faults that the job recovered from", "cause", cause=FAULT_CAUSES),
        _histogram(
            "recovery_seconds",
            "From the evidence of a fault to the end of the next step: the whole, and its phases",
            RECOVERY_BUCKETS,
            "phase",
            phase=RECOVERY_PHASES,
        ),
        _counter("resizes_total", "Planned changes of workers or layout", "cause", cause=RESIZE_CAUSES),
        _histogram(
            "resize_seconds", "From the begin of a planned change to the end of the next step", RECOVERY_BUCKETS
        ),
        _counter("hangs_total", "Generations that were ended since nobody got ahead"),
        _counter("stragglers_total", "Ranks found to compute more slowly than the others"),
        _counter("quarantines_total", "Nodes put in quarantine"),
        _counter("controller_returns_total", "Times that the controller was lost and has returned"),
        _counter("replica_mismatches_total", "Comparisons that found replicas to differ"),
    ),
    "Goodput": (
        Metric(
            PREFIX + "goodput_seconds",
            Kind.GAUGE,
            "Wall time by class, which add up to the age of the job; a gauge, since a rollback moves time from "
            "productive to lost",
            "seconds",
            ("class",),
            (("class", CLASSES),),
        ),
        _gauge("goodput_ratio", "Productive share of the wall time", unit="ratio", mirrored=True),
    ),
    "State": (
        _histogram("snapshot_seconds", "Training stands still for a snapshot or a checkpoint, rank 0", STEP_BUCKETS),
        _gauge("snapshot_step", "Newest step that memory holds completely, on all ranks"),
        _gauge("snapshot_bytes", "Shared memory in use for snapshots and their copies", "node", unit="bytes"),
        _counter("snapshot_failures_total", "Troubles of the memory tier", "reason", reason=MEMORY_TROUBLES),
        _counter("checkpoints_total", "Checkpoints made durable"),
        _counter("checkpoint_failures_total", "Checkpoints that failed"),
        _counter("checkpoints_skipped_total", "Checkpoints left out, since the one before was still being written"),
        _counter("checkpoint_bytes_total", "Tensor bytes made durable", unit="bytes"),
        _histogram("checkpoint_seconds", "From a snapshot to its durable checkpoint", SAVE_BUCKETS),
        _gauge("checkpoint_step", "Steps done in the newest durable checkpoint"),
        _gauge(
            "checkpoint_age_seconds",
            "Since this job made a checkpoint durable; since its begin, as long as it has made none",
            unit="seconds",
        ),
    ),
    "Data": (
        _counter("bad_samples_total", "Damaged samples that were replaced", "reason"),
        _gauge("loaders", "Data loaders that answer"),
    ),
    "Energy": (
        _counter(
            "node_energy_joules_total", "Energy by the node's meters, where it has any", "node", "meter", unit="joules"
        ),
    ),
}
"""By group, in the order of the documentation."""

CATALOGUE: dict[str, Metric] = {metric.name: metric for group in METRICS.values() for metric in group}
"""Every metric by its name."""


def metric(name: str) -> Metric:
    """The metric of a name, with or without the prefix.

    Raises:
        KeyError: there is none.
    """
    return CATALOGUE[name if name.startswith(PREFIX) else PREFIX + name]
