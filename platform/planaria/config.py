"""JobConfig: the one validated description of a training job.

Read from YAML, overridden by ``key=value`` pairs, checked as a whole before any process starts.
Every problem becomes a :class:`ConfigError` that names file, key, given value and remedy.
"""

from __future__ import annotations

import math
import os
import re
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from planaria.config_errors import explain, short, subsection, without_passwords
from planaria.config_variables import expand_tree, origin_of


class ConfigError(ValueError):
    """A job description that cannot be run; the message lists every problem with its remedy."""


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are immutable, numbers are not quietly cast."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_quiet_casts(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic would read true as 1, "5" as 5 and 1 as true: each is more likely a slip than a wish."""
        _refuse_cast(cls.model_fields[str(info.field_name)].annotation, value)
        return value


def _refuse_cast(annotation: Any, value: Any) -> None:
    """Raise ``ValueError`` where a value has another type than the key, and pydantic would cast it."""
    choices = _alternatives(annotation)
    if get_origin(choices[0]) is tuple and isinstance(value, (list, tuple)):
        for item in value:
            _refuse_cast(get_args(choices[0])[0], item)
    elif bool in choices and not isinstance(value, bool):
        raise ValueError("expected true or false")
    elif int in choices and isinstance(value, (bool, str)):
        raise ValueError("expected a whole number" + (", without quotes or exponent" if isinstance(value, str) else ""))
    elif float in choices and isinstance(value, bool):
        raise ValueError("expected a number")
    # Text that reads as a float passes: YAML 1.1 takes 3e-4, without a point, for text.


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """The types that ``annotation`` allows, ``None`` left out."""
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(part for part in get_args(annotation) if part is not type(None))
    return (annotation,)


class LoraConfig(Section):
    """Low-rank adapters beside frozen weights (peft)."""

    rank: int = Field(8, ge=1, description="inner size of an adapter")
    alpha: float = Field(16.0, gt=0, description="an adapter's output is multiplied by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="of what enters an adapter")
    targets: tuple[str, ...] = Field(
        (), description="last names of the linear layers that get one, e.g. q_proj; empty: all in layers that train"
    )


class ModelConfig(Section):
    """Which model: a preset, a Hugging Face config given inline, or a local directory with weights."""

    preset: str | None = Field(None, description="name of a built-in tiny model, e.g. llava-tiny")
    config: dict[str, Any] | None = Field(None, description="inline Hugging Face config (model_type: llava, ...)")
    path: str | None = Field(None, description="local Hugging Face directory with config.json and weights")
    freeze: tuple[Literal["vision", "projector", "language"], ...] = Field((), description="parts that do not train")
    lora: LoraConfig | None = Field(
        None,
        description="train low-rank adapters in parts that are not frozen, and nothing else; null: all weights",
    )

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        given = [name for name in ("preset", "config", "path") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of preset, config, path (given: {', '.join(given) or 'none'})")
        if set(self.freeze) == {"vision", "projector", "language"}:
            raise ValueError("freeze lists every part, so nothing would train; leave at least one out")
        return self


class ScenesConfig(Section):
    """Size and mix of the embedded synthetic data set."""

    train_samples: int = Field(100_000, ge=1)
    val_samples: int = Field(512, ge=1)
    colours: int = Field(8, ge=2, le=8)
    max_shapes: int = Field(3, ge=1, le=4)
    caption_fraction: float = Field(0.25, ge=0, le=1, description="share of samples that are captions, not questions")
    text_only_fraction: float = Field(0.0, ge=0, le=1, description="share of samples without a picture")


class ColumnsConfig(Section):
    """Which column of a table, or key of a JSON record, holds what; null: guessed from its name and type."""

    image: str | None = Field(None, description="pictures: bytes, {bytes, path}, a path, or a list of these")
    text: str | None = Field(None, description="caption, or the answer to what stands in prompt")
    prompt: str | None = Field(None, description="question; without one, data.prompt stands before every caption")
    conversation: str | None = Field(None, description="list of turns, in place of text and prompt")
    key: str | None = Field(None, description="what names a sample in logs; without one, its place in the file")


class SourceConfig(Section):
    """One data set of a mixture."""

    name: str = Field(..., min_length=1, description="of the data set in records; its order depends on it")
    path: str = Field(..., min_length=1, description="training files, as in data.path")
    weight: float = Field(1.0, gt=0, allow_inf_nan=False, description="share of the samples, beside the other weights")


class DataConfig(Section):
    """Where samples come from and how they are prepared."""

    source: Literal["scenes", "files", "webdataset"] = Field(
        "scenes", description="scenes: drawn on the fly; files: what lies at path; webdataset: files of that format"
    )
    path: str | None = Field(None, description="training files: a file, folder or glob, local or s3://")
    mixture: tuple[SourceConfig, ...] = Field(
        (), description="several data sets in place of path, mixed by weight; each has epochs of its own"
    )
    val_path: str | None = Field(None, description="held-out files, likewise")
    format: Literal["auto", "webdataset", "parquet", "hf", "mds", "llava"] = Field(
        "auto", description="of the files; auto: told from their names"
    )
    columns: ColumnsConfig = ColumnsConfig()
    image_root: str | None = Field(
        None, description="folder that paths of pictures start from; null: the folder of the file that names them"
    )
    cache_dir: str | None = Field(
        None,
        description="folder on each node for copies of remote and unpacked files; null: a temporary one",
    )
    cache_gib: float = Field(20.0, gt=0, description="most that the cache keeps on one node, in GiB")
    tokenizer: str = Field("bytes", description='"bytes" (ByT5, needs no files) or a local tokenizer directory')
    prompt: str = Field("Describe the picture.", description="instruction before a caption")
    max_length: int = Field(256, ge=8, description="tokens per sample, image placeholders included")
    shuffle: bool = True
    shuffle_block: int | None = Field(
        None, ge=1, description="shards in use at a time: samples are shuffled within so many; null: all of them"
    )
    accept_changes: bool = Field(
        False, description="go on from a checkpoint although the training data are other ones than it was made with"
    )
    loaders: int = Field(2, ge=1, description="CPU data-loading actors")
    loader_cpus: float = Field(0.0, ge=0, description="CPUs that Ray reserves per loading actor")
    prefetch: int = Field(2, ge=1, le=64, description="steps requested ahead by each worker")
    max_bad_fraction: float = Field(0.001, ge=0, le=1, description="share of damaged samples that stops the run")
    timeout_s: float = Field(60.0, gt=0, description="time limit for one batch before another loader is asked")
    scenes: ScenesConfig = ScenesConfig()

    @model_validator(mode="after")
    def _paths(self) -> DataConfig:
        if self.source == "scenes" and self.mixture:
            raise ValueError("source: scenes renders its pictures; remove mixture or set source: files")
        if self.mixture and self.path:
            raise ValueError("path and mixture contradict; give path a name of its own in mixture")
        names = [source.name for source in self.mixture]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"mixture: the name {repeated[0]!r} stands twice; give every source its own")
        if self.source != "scenes" and not self.path and not self.mixture:
            raise ValueError(f"source: {self.source} needs path, a glob such as data/train-*.tar")
        if self.source == "scenes" and (self.path or self.val_path):
            raise ValueError("source: scenes renders its pictures; remove path/val_path or set source: files")
        if self.source == "scenes":
            for name in ("format", "columns", "image_root"):
                if name in self.model_fields_set and getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"source: scenes renders its pictures; remove {name} or set source: files")
        if self.source == "webdataset" and self.format not in ("auto", "webdataset"):
            raise ValueError(f"source: webdataset and format: {self.format} contradict; set source: files")
        return self


class ScheduleConfig(Section):
    """Learning rate as a pure function of the step."""

    kind: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: int = Field(0, ge=0)
    min_ratio: float = Field(0.1, ge=0, le=1, description="final learning rate as a share of the peak")


class OptimConfig(Section):
    """Optimizer and schedule."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    momentum: float = Field(0.0, ge=0, lt=1, description="sgd only")
    weight_decay: float = Field(0.01, ge=0)
    clip_norm: float | None = Field(1.0, gt=0, description="global gradient-norm limit; null: no clipping")
    vision_lr_scale: float = Field(1.0, gt=0, description="learning-rate factor of the vision encoder")
    schedule: ScheduleConfig = ScheduleConfig()

    @field_validator("betas")
    @classmethod
    def _betas(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("both betas must be at least 0 and below 1")
        return value

    @model_validator(mode="after")
    def _momentum(self) -> OptimConfig:
        if self.momentum and self.name != "sgd":
            raise ValueError(
                f"momentum={self.momentum} has no effect with name={self.name}; remove momentum or set name: sgd"
            )
        return self


class LossScaleConfig(Section):
    """The factor on the loss that keeps small gradients of half precision from vanishing (train.precision: fp16)."""

    initial: float = Field(2.0**16, gt=0, le=2.0**30, description="factor at the first step, a power of two")
    growth: float = Field(2.0, gt=1, description="factor on the scale after interval good steps, a power of two")
    backoff: float = Field(0.5, gt=0, lt=1, description="factor on the scale after an overflow, a power of two")
    interval: int = Field(2000, ge=1, description="steps in a row without an overflow before the scale grows")

    @model_validator(mode="after")
    def _exact(self) -> LossScaleConfig:
        for name in ("initial", "growth", "backoff"):
            value = getattr(self, name)
            if math.frexp(value)[0] != 0.5:
                nearest = 2.0 ** round(math.log2(value))
                raise ValueError(
                    f"{name}={value:g} is not a power of two, so gradients would be rounded as they are scaled back; "
                    f"the nearest is {nearest:g}"
                )
        return self


class TrainConfig(Section):
    """What one optimizer step is, and how many of them."""

    steps: int = Field(..., ge=1)
    global_batch: int = Field(..., ge=1, description="samples per optimizer step, whatever the number of workers")
    micro_batch: int = Field(8, ge=1, description="most samples per forward pass on one worker")
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = Field(
        "fp32", description="of computation; bf16 and fp16 keep float32 master weights, moments and gradient sums"
    )
    reduce_precision: Literal["fp32", "bf16", "fp16"] | None = Field(
        None, description="in which gradients travel between ranks; null: float32, or float64 with precision: fp64"
    )
    loss_scale: LossScaleConfig = LossScaleConfig()
    recompute: Literal["none", "unit", "selective"] = Field(
        "none",
        description="activations that the backward pass computes again: unit: all inside of a layer; selective: all "
        "but the outputs of matrix products and attention",
    )

    @model_validator(mode="after")
    def _reductions(self) -> TrainConfig:
        if self.precision == "fp64" and self.reduce_precision is not None:
            raise ValueError(
                f"reduce_precision={self.reduce_precision} would round the gradients of precision=fp64; leave it out"
            )
        if self.reduce_precision == "fp16" and self.precision != "fp16":
            raise ValueError(
                f"reduce_precision=fp16 overflows without loss scaling, which precision={self.precision} has not; "
                "use bf16 or fp32"
            )
        return self


class EngineConfig(Section):
    """What runs the steps: ``engine: deepspeed`` is short for ``engine: {name: deepspeed}``."""

    name: Literal["native", "deepspeed"] = Field(
        "native", description="native: FSDP2, tensor and sequence parallelism; deepspeed: ZeRO on data-parallel ranks"
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(
        2,
        description="deepspeed only: what is sharded; 0: nothing, 1: optimizer state, 2: and gradients, "
        "3: and parameters",
    )
    offload_optimizer: Literal["cpu"] | None = Field(
        None, description="deepspeed only: where optimizer state and master weights are kept; null: on the device"
    )

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _deepspeed_only(self) -> EngineConfig:
        defaults = type(self).model_fields
        given = [key for key in ("zero_stage", "offload_optimizer") if getattr(self, key) != defaults[key].default]
        if self.name == "native" and given:
            raise ValueError(f"{', '.join(given)} has no effect with name: native; remove it, or set name: deepspeed")
        if self.offload_optimizer is not None and self.zero_stage == 0:
            raise ValueError(
                "offload_optimizer needs zero_stage of at least 1: stage 0 updates the model's own parameters in place"
            )
        return self


class LayoutConfig(Section):
    """Constraints for the planner; the data-parallel degree follows from the workers that live."""

    tp: int = Field(1, ge=1, description="preferred tensor-parallel degree, inside one node")
    cp: int = Field(
        1, ge=1, description="preferred context-parallel degree (long sequences): tp x cp ranks stay inside one node"
    )
    sequence_parallel: bool = Field(True, description="shard activations along the sequence between TP blocks")
    dp_replicate: int = Field(1, ge=1, description="preferred number of full replicas (HSDP)")
    pp: int = Field(1, ge=1, description="preferred number of pipeline ranks")
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = Field(
        "1f1b", description="order in which pipeline ranks work through their micro-batches"
    )
    virtual_stages: int = Field(1, ge=1, description="stages per pipeline rank; interleaved and zero_bubble only")

    @model_validator(mode="after")
    def _pipeline(self) -> LayoutConfig:
        if self.virtual_stages > 1 and self.pipeline_schedule in ("gpipe", "1f1b"):
            raise ValueError(
                f"virtual_stages={self.virtual_stages}, but {self.pipeline_schedule} has one stage per rank; "
                "set pipeline_schedule: interleaved, or virtual_stages: 1"
            )
        if self.pipeline_schedule == "interleaved" and self.virtual_stages == 1:
            raise ValueError("pipeline_schedule: interleaved needs virtual_stages of at least 2; set it, or take 1f1b")
        return self


class ContrastiveConfig(Section):
    """Training of dual encoders (CLIP, SigLIP); of no effect on other models."""

    columns: int = Field(
        8192, ge=1, description="features of all ranks that a rank compares its own with at a time: bounds its memory"
    )
    max_scale: float = Field(100.0, gt=1, description="greatest factor on the logits that the model may learn")


class CommunicationConfig(Section):
    """What travels between ranks in a step, and how; see docs/communication.md."""

    accumulate: Literal["shard", "whole"] = Field(
        "shard",
        description="gradients between the micro-batches of a step: shard: reduce-scattered after each, which needs "
        "the memory of a shard; whole: kept whole and sent once, after the last",
    )
    prefetch: bool = Field(True, description="gather the next layer's parameters while one layer computes forward")
    compression: Literal["none", "bf16", "int8", "powersgd"] = Field(
        "none", description="of gradients between replicas (dp_replicate); int8 and powersgd with error feedback"
    )
    powersgd_rank: int = Field(4, ge=1, le=128, description="rank of the factors that powersgd sends per matrix")
    bucket_mb: float = Field(16.0, gt=0, description="most gradient in one compressed message between replicas, MB")
    sync_every: int | None = Field(
        None,
        ge=1,
        description="steps that each replica trains for itself before an outer step joins them (local SGD, DiLoCo); "
        "null: replicas add up their gradients in every step",
    )
    outer_lr: float = Field(0.7, gt=0, description="learning rate of the outer step; 1 without momentum: the mean")
    outer_momentum: float = Field(0.9, ge=0, lt=1, description="Nesterov momentum of the outer step")

    @model_validator(mode="after")
    def _one_way(self) -> CommunicationConfig:
        if self.sync_every is not None and self.compression != "none":
            raise ValueError(
                f"compression={self.compression} is for gradients, of which none are sent with "
                f"sync_every={self.sync_every}; remove one of the two"
            )
        return self


class ElasticConfig(Section):
    """How far the job may shrink and grow, and when it gives up."""

    min_workers: int = Field(1, ge=1)
    max_workers: int = Field(1, ge=1)
    max_failures: int = Field(
        3, ge=-1, description="failures in a row without a new step before the job stops; -1: no limit"
    )
    wait_s: float = Field(300.0, gt=0, description="longest wait for min_workers")
    settle_s: float = Field(5.0, ge=0, description="quiet time of the set of ready workers before the job grows")
    autoscale: bool = Field(
        True,
        description="ask Ray's autoscaler for max_workers; the request is the whole cluster's, not the job's alone",
    )
    orphan_s: float = Field(
        60.0, gt=0, description="how long training goes on without its controller, which returns if it can"
    )
    standbys: int | None = Field(
        None,
        ge=0,
        description="idle processes per node, imported and ready, that replace workers which crash; "
        "null: one where workers run on GPUs, none where they run on CPUs, whose cores it would share",
    )
    on_driver_loss: Literal["stop", "continue"] = Field(
        "stop", description="when the driver is gone for orphan_s: end with a checkpoint, or train to the end without"
    )
    node_failures: int = Field(
        3,
        ge=0,
        le=32,
        description="failures on one node within ten minutes before it is quarantined for a while; 0: no limit",
    )
    straggler_ratio: float = Field(
        1.5, gt=1, description="a rank that computes this many times longer than the median is a straggler"
    )
    replace_stragglers: bool = Field(False, description="whether an idle worker takes over a straggler's rank")
    bad_steps: int = Field(
        5, ge=1, description="steps in a row with a loss or gradient that is not finite before the job rolls back"
    )
    silence_s: float = Field(20.0, gt=0, description="a worker whose process says nothing for longer counts as lost")
    abort_s: float = Field(2.0, gt=0, description="a worker that takes longer to leave a broken collective is replaced")
    hang_s: float = Field(300.0, gt=0, description="longest step before the generation counts as hung")

    @model_validator(mode="after")
    def _range(self) -> ElasticConfig:
        if self.min_workers > self.max_workers:
            raise ValueError(
                f"min_workers={self.min_workers} exceeds max_workers={self.max_workers}; "
                "lower min_workers or raise max_workers"
            )
        return self


class HealthConfig(Section):
    """What the job checks of itself while it trains."""

    check_replicas_every: int = Field(
        0, ge=0, description="steps between comparisons of data-parallel replicas, bit by bit; 0: never"
    )


class ResourcesConfig(Section):
    """What one worker occupies on its node."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: GPUs if the cluster has any, else CPUs")
    cpus: float = Field(1.0, ge=0, description="CPUs that Ray reserves per worker")
    gpus: float = Field(1.0, gt=0, description="GPUs that Ray reserves per worker, where workers run on GPUs")


class MemoryConfig(Section):
    """Snapshots of the training state in the nodes' memory, from which a fault is recovered."""

    every: int = Field(1, ge=0, description="steps between snapshots; 0: only for checkpoints and changes of size")
    replicas: int = Field(1, ge=0, description="copies of every slice on other nodes")
    folder: str = Field("/dev/shm", description="where shared memory is; a local disk is possible, and slower")


class CheckpointConfig(Section):
    """Durable sharded state."""

    every: int = Field(50, ge=1, description="steps between checkpoints")
    keep_last: int = Field(2, ge=1, description="intact checkpoints to keep")
    keep_every: int | None = Field(None, ge=1, description="keep those of steps that are multiples of this for ever")
    path: str | None = Field(
        None, description="folder or s3://bucket/prefix below which <name>/checkpoints lies; default: storage"
    )
    at_end: bool = True

    @field_validator("path")
    @classmethod
    def _place(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if not value.strip():
            raise ValueError("expected a folder or s3://bucket/prefix; leave the key out to use storage")
        if "://" in value and not re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^?#]*)?", value):
            raise ValueError(
                "expected a folder that all nodes see, or s3://bucket/prefix; endpoint and keys come from the "
                "environment (AWS_ENDPOINT_URL, AWS_PROFILE, AWS_ACCESS_KEY_ID, ...)"
            )
        return value.rstrip("/") or "/"


class MetricsConfig(Section):
    """What Prometheus can read of the job, from its controller (docs/metrics.md)."""

    enabled: bool = True
    port: int = Field(
        9464,
        ge=0,
        le=65535,
        description="where the controller serves /metrics; the next ports if it is taken; 0: any that is free",
    )
    host: str | None = Field(
        None, description="address to listen on; null: the node's in the cluster, and the loopback; 0.0.0.0: all"
    )
    ray_mirror: bool = Field(True, description="show a few series among Ray's own metrics, too, as ray_planaria_...")


class EvaluateConfig(Section):
    """Held-out evaluation."""

    samples: int = Field(256, ge=0, description="held-out samples; 0: none")
    at_end: bool = True


class JobConfig(Section):
    """One training job."""

    name: str = Field(
        "planaria", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="run name: a folder under storage"
    )
    seed: int = Field(0, ge=0)
    model: ModelConfig | None = Field(None, description="left out when the recipe is the user's own")
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    contrastive: ContrastiveConfig = ContrastiveConfig()
    train: TrainConfig
    engine: EngineConfig = EngineConfig()
    layout: LayoutConfig = LayoutConfig()
    communication: CommunicationConfig = CommunicationConfig()
    elastic: ElasticConfig = ElasticConfig()
    health: HealthConfig = HealthConfig()
    resources: ResourcesConfig = ResourcesConfig()
    memory: MemoryConfig = MemoryConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    metrics: MetricsConfig = MetricsConfig()
    ledger: Literal["ids", "digest"] = Field(
        "ids",
        description="what ledger.jsonl holds of a step: all sample ids, or their number and a digest",
    )
    storage: str = Field("runs", description="folder (shared by all nodes) for runs and checkpoints")

    @field_validator("storage")
    @classmethod
    def _folder(cls, value: str) -> str:
        if "://" in value:
            raise ValueError(
                "expected a folder that all nodes see, e.g. a network mount; a URL goes to checkpoint.path"
            )
        return value

    @model_validator(mode="after")
    def _combination(self) -> JobConfig:
        if self.optim.schedule.warmup_steps >= self.train.steps:
            raise ValueError(
                f"optim.schedule.warmup_steps={self.optim.schedule.warmup_steps} leaves no step of "
                f"train.steps={self.train.steps}; shorten the warm-up or train longer"
            )
        if self.layout.pp > 1 and self.layout.pp * self.layout.tp * self.layout.cp > self.elastic.max_workers:
            raise ValueError(
                f"layout.pp={self.layout.pp} x layout.tp={self.layout.tp} x layout.cp={self.layout.cp} needs as many "
                f"workers, but elastic.max_workers={self.elastic.max_workers}; raise max_workers or lower one of them"
            )
        if self.layout.cp > 1 and self.layout.tp * self.layout.cp > self.elastic.max_workers:
            raise ValueError(
                f"layout.tp={self.layout.tp} x layout.cp={self.layout.cp} needs as many workers, but "
                f"elastic.max_workers={self.elastic.max_workers}; raise max_workers or lower one of them"
            )
        if self.layout.tp > self.elastic.max_workers:
            raise ValueError(
                f"layout.tp={self.layout.tp} needs at least as many workers, but elastic.max_workers="
                f"{self.elastic.max_workers}; raise max_workers or lower tp"
            )
        if self.engine.name == "deepspeed":
            _check_deepspeed(self)
        return self

    @model_validator(mode="after")
    def _native_only(self) -> JobConfig:
        given = self.communication
        if self.engine.name != "native" and given != CommunicationConfig():
            changed = sorted(key for key, value in given if value != getattr(CommunicationConfig(), key))
            raise ValueError(
                f"communication.{changed[0]} has no effect with engine.name={self.engine.name}; "
                "remove it, or set engine.name=native"
            )
        return self

    @model_validator(mode="after")
    def _remembered(self) -> JobConfig:
        """What communication remembers of each parameter goes neither with pipeline stages nor with a loss scale."""
        given = self.communication
        feedback = given.compression in ("int8", "powersgd")
        if self.layout.pp > 1 and (feedback or given.sync_every is not None):
            key = f"compression={given.compression}" if feedback else f"sync_every={given.sync_every}"
            raise ValueError(f"communication.{key} does not go with layout.pp={self.layout.pp} yet; set layout.pp=1")
        if self.train.precision == "fp16" and feedback:
            raise ValueError(
                f"communication.compression={given.compression} feeds errors back from one step to the next, between "
                "which the loss scale of train.precision=fp16 may change; take bf16 for one of the two"
            )
        return self

    @model_validator(mode="after")
    def _outer_steps(self) -> JobConfig:
        """Between outer steps replicas differ, so that there is no state of the job to keep."""
        length = self.communication.sync_every
        if length is None:
            return self
        for key, steps in (("train.steps", self.train.steps), ("checkpoint.every", self.checkpoint.every)):
            if steps % length:
                raise ValueError(
                    f"{key}={steps} is no multiple of communication.sync_every={length}, and between outer steps "
                    "there is nothing to keep; make it one"
                )
        every = self.memory.every
        if every and every % length and length % every:
            raise ValueError(
                f"memory.every={every} and communication.sync_every={length}: snapshots are taken after outer steps; "
                "let one be a multiple of the other"
            )
        return self


def _check_deepspeed(job: JobConfig) -> None:
    """Raise ``ValueError`` for what the DeepSpeed engine does not run."""
    for axis in ("tp", "cp", "pp", "dp_replicate"):
        if (degree := getattr(job.layout, axis)) > 1:
            raise ValueError(
                f"layout.{axis}={degree} with engine.name=deepspeed, which shards over all workers and splits nothing "
                f"else; set layout.{axis}: 1, or engine.name: native"
            )
    precision, stage = job.train.precision, job.engine.zero_stage
    if precision not in ("fp32", "bf16"):
        raise ValueError(
            f"train.precision={precision} with engine.name=deepspeed, whose master weights are float32; "
            "set train.precision: fp32 or bf16, or engine.name: native"
        )
    if job.train.recompute != "none" or job.train.reduce_precision is not None:
        raise ValueError(
            f"train.recompute={job.train.recompute}, train.reduce_precision={job.train.reduce_precision} with "
            "engine.name=deepspeed, which neither recomputes activations nor reduces in less than float32; leave both "
            "out, or set engine.name: native"
        )
    if precision == "bf16" and stage < 2:
        raise ValueError(
            f"engine.zero_stage={stage} with train.precision=bf16: gradients would be added up in bf16; "
            "set engine.zero_stage: 2 or 3, or train.precision: fp32"
        )


def vault_root(job: JobConfig, run_dir: str | Path) -> str:
    """Folder or URL below which the job's ``checkpoints`` lie: the run directory unless ``checkpoint.path`` is set."""
    place = job.checkpoint.path
    return str(run_dir) if place is None else f"{place.rstrip('/')}/{job.name}"


def load(path: str | Path, overrides: Iterable[str] = ()) -> JobConfig:
    """Read and check a job file.

    Text values may hold ``${NAME}`` and ``${NAME:-default}``, taken from the environment of this process.

    Args:
        path: YAML file.
        overrides: ``dotted.key=value`` pairs; the value is read as YAML, a later pair wins.

    Raises:
        ConfigError: everything that is wrong, each with file (or ``--set``), key, value and remedy.
    """
    path = Path(path)
    try:
        tree = _read_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the path of a job file, e.g. jobs/configs/scenes.yaml") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; give the path of a job file in it") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not UTF-8 text (byte {error.start}); is it a job file? If so, save it as UTF-8"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML, {_yaml_problem(error)}") from None
    if tree is None:
        raise ConfigError(f"{path}: is empty; it needs at least the sections model: and train:")
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of sections (model:, train:, ...), found {short(tree)}")
    origins: dict[str, str] = {}
    for override in overrides:
        key = _apply_override(tree, override)
        origins[key] = f"--set {override}"
    tree, unresolved = expand_tree(tree, os.environ)
    if unresolved:
        lines = [
            f"{next(origin_of(key, origins), path)}: {key}: {short(value)} is not acceptable; {problem}"
            for key, value, problem in unresolved
        ]
        raise ConfigError("\n".join(lines))
    return parse(tree, str(path), origins)


def parse(tree: Mapping[str, Any], source: str = "job", origins: Mapping[str, str] | None = None) -> JobConfig:
    """Check a tree of plain values. ``source`` names it in errors; ``origins`` maps overridden keys to their flag.

    A section that is there but empty (``data:`` with every line commented out) counts as left out.
    """
    try:
        return JobConfig.model_validate(_fill_empty_sections(JobConfig, tree))
    except ValidationError as error:
        lines = [explain(problem, JobConfig, source, origins or {}) for problem in error.errors()]
        raise ConfigError(without_passwords("\n".join(lines))) from None


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping: YAML would quietly drop the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value!r} stands twice in one section; keep one of them",
                        problem_mark=key.start_mark,
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def _read_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_UniqueKeyLoader)  # a SafeLoader: plain values only


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return f"{place}{problem or error}"


def _apply_override(tree: dict[str, Any], override: str) -> str:
    key, separator, text = override.partition("=")
    key = key.strip()
    parts = key.split(".")
    if not separator or not all(part.strip() == part != "" for part in parts):
        raise ConfigError(f"--set {override}: expected key=value, e.g. --set optim.lr=3e-4")
    try:
        value = _read_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override}: the value is not valid YAML, {_yaml_problem(error)}; quote it") from None
    node: dict[str, Any] = tree
    *parents, leaf = parts
    for depth, part in enumerate(parents):
        child = node.setdefault(part, {})
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            above = ".".join(parents[: depth + 1])
            raise ConfigError(
                f"--set {override}: {above} is a value ({short(child)}), not a section; "
                f"set {above} itself, or a whole section first: --set '{above}={{...}}'"
            )
        node = child
    node[leaf] = value
    return key


def _fill_empty_sections(section: type[BaseModel], tree: Mapping[str, Any]) -> dict[str, Any]:
    filled: dict[str, Any] = {}
    for key, value in tree.items():
        below = subsection(section, key)
        if below and value is None and section.model_fields[key].default is not None:
            value = {}
        filled[key] = _fill_empty_sections(below, value) if below and isinstance(value, Mapping) else value
    return filled
