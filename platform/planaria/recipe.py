"""The protocol between the platform and a model: what to train, on what, towards what.

The platform's own vision-language recipe (:mod:`planaria.models.vlm`) implements it; a user's
``torch.nn.Module`` joins by implementing the same five methods. See ``docs/custom_models.md``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch import nn

    from planaria.config import JobConfig
    from planaria.state.boxes import Box


class BadSample(Exception):
    """A sample that cannot be decoded. ``key`` names it, ``cause`` says why.

    The platform counts it, logs it and puts a deterministic substitute in its slot. Transient
    I/O trouble is not a bad sample: let the ``OSError`` through, and the read is retried.
    """

    def __init__(self, key: str, cause: str) -> None:
        super().__init__(key, cause)
        self.key = key
        self.cause = cause

    def __str__(self) -> str:
        return f"sample {self.key}: {self.cause}"


@runtime_checkable
class Dataset(Protocol):
    """Random access to samples. Every loader must see the same length and the same samples."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any:
        """Sample ``index``; raises :class:`BadSample` when it is damaged."""
        ...


@dataclass(frozen=True)
class PixelScale:
    """How the bytes of pictures [N, channels, height, width] become a model's input: ``(byte / 255 - mean) / std`` in
    float32, one mean and deviation per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass
class MicroBatch:
    """What one forward pass consumes. Arrays travel through Ray's object store without a copy."""

    arrays: dict[str, np.ndarray]
    targets: int
    """Number of target units (tokens, or samples) with weight; the loss is normalised by their global sum."""
    ids: list[int] = field(default_factory=list)
    """Dataset indices of the weighted samples, for the exactly-once ledger."""
    tokens: int = 0
    """Weighted input tokens, for throughput figures."""
    scales: dict[str, PixelScale] = field(default_factory=dict)
    """Arrays of bytes that the engine scales on its device: pictures travel in a quarter of the memory."""


@dataclass(frozen=True)
class ShardingRules:
    """How a model is cut. Everything has a default, so a plain module needs none of it.

    ``units``: dotted names of the modules that FSDP2 gathers one at a time (default: none, one root
    unit); none may lie inside another.

    ``colwise``/``rowwise``: leaf names of ``nn.Linear`` inside a unit that tensor parallelism splits by
    output/input features. Their parent is a sub-module of the unit (attention, MLP) that takes the hidden
    states as its first argument or as ``hidden_states``, holds both kinds, and adds no residual of its own.

    ``replicate``: names inside a unit of modules that TP keeps whole, with all that is in them; under
    sequence parallelism these must work position by position.

    ``sequence_parallel``: one (first unit, module after the last unit) pair per stack of units whose
    activations [batch, sequence, hidden] may be sharded along the sequence between attention and MLP.
    """

    units: tuple[str, ...] = ()
    colwise: frozenset[str] = frozenset()
    rowwise: frozenset[str] = frozenset()
    replicate: frozenset[str] = frozenset()
    sequence_parallel: tuple[tuple[str, str], ...] = ()
    head_attributes: frozenset[str] = frozenset()
    """Integer attributes of modules with colwise leaves that their forward reshapes heads by, and TP divides."""
    vocabulary_head: str | None = None
    """Name of an untied output ``nn.Linear`` that TP splits by vocabulary."""
    heads: Mapping[str, int] = field(default_factory=dict)
    """Counts that the TP degree must divide, by the name to show in an error."""
    sequence_heads: Mapping[str, int] = field(default_factory=dict)
    """Query heads in the stacks of ``sequence_parallel``: TP x CP must divide their numbers."""


@dataclass(frozen=True)
class LogitsPart:
    """Which part of its logits [B, L, V] a model yields on this rank: even parts along L and V, in order of ranks."""

    sequence: dist.ProcessGroup | None = None
    """The ranks that share the sequence, or None if each has the whole."""
    vocabulary: dist.ProcessGroup | None = None
    """The ranks that share the vocabulary, or None if each has the whole."""


def logits_part(model: nn.Module) -> LogitsPart:
    """What an engine has said of ``model``'s logits; the whole where it has said nothing."""
    return getattr(model, "planaria_logits_part", LogitsPart())


@dataclass(frozen=True)
class StageRules:
    """Where a model may be cut into pipeline stages.

    ``layers``: dotted names of the layers between which cuts may lie, in the order in which they run. They are the
    children of one ``nn.ModuleList``, are units of the sharding rules, and each takes the hidden states as its first
    argument and returns them, [batch, sequence, hidden].

    ``last``: names of the modules behind the last layer (final norm, output head). All other modules that have
    parameters belong to the first stage. A parameter may be shared between the first stage and the last one.

    ``positions``: positions per sample that pass through the modules below a name; what cost is modelled from.
    Names that are not listed count 1.

    ``together``: how many of the first layers stay in the first stage, since more than hidden states connects them.
    """

    layers: tuple[str, ...]
    last: tuple[str, ...] = ()
    positions: Mapping[str, int] = field(default_factory=dict)
    together: int = 1
    seconds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Measured times of forward and backward pass per micro-batch, by name of layer; ``first`` and ``last`` are what
    these stages do besides. Where given, cuts follow them instead of modelled costs; names that miss count nothing."""


class Recipe(Protocol):
    """Model, data and loss of one training job. Instances are pickled to every actor."""

    def dataset(self, split: str) -> Dataset:
        """The samples of ``"train"`` or ``"val"``."""
        ...

    def collate(self, samples: Sequence[Any], weights: Sequence[int]) -> MicroBatch:
        """Arrays for one forward pass. ``weights[i]`` is 1, or 0 for a filler whose loss must not count.

        ``samples`` is never empty. Leave ``ids`` to the platform.
        """
        ...

    def build_model(self) -> nn.Module:
        """The whole model, unsharded. Called under ``torch.device("meta")`` by a :class:`MetaRecipe`,
        else on the CPU under a fixed seed."""
        ...

    def loss(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """SUM (not mean) of the losses of the batch's weighted targets; a scalar with a gradient."""
        ...

    def sharding(self, model: nn.Module) -> ShardingRules:
        """Units and tensor-parallel rules; ``ShardingRules()`` is a valid answer."""
        ...


@runtime_checkable
class MetaRecipe(Protocol):
    """A recipe whose model is built without memory and initialised piece by piece: needed for large models."""

    def init_module(self, model: nn.Module, name: str, module: nn.Module) -> None:
        """Initialise weights and buffers of ``module``, a materialised CPU copy of ``model``'s submodule ``name``.

        ``model`` is the whole model on the meta device, to look up owners and configs; the global random
        generator is seeded by the caller from (job seed, name). ``name`` is ``""`` for everything outside the units.
        """
        ...


class StateReader(Protocol):
    """Where an engine takes its state from: a checkpoint, peers' memory, weights on disk, or fresh ones."""

    @property
    def step(self) -> int:
        """Steps completed in this state."""
        ...

    def read(self, tensor: str, box: Box) -> torch.Tensor:
        """The part ``box`` of the global tensor ``model/NAME`` or ``optim/KEY[/NAME]``, on the CPU."""
        ...


@runtime_checkable
class DirectReader(StateReader, Protocol):
    """A reader that can spare the copy of what it reads."""

    def read_into(self, wanted: Iterable[tuple[str, Box, torch.Tensor]]) -> None:
        """Like :meth:`read`, of many boxes, each into a tensor of any dtype and device; undefined after an error."""
        ...


@runtime_checkable
class ListedReader(StateReader, Protocol):
    """A reader that knows what it can read."""

    @property
    def tensors(self) -> Collection[str]:
        """Names of all tensors."""
        ...


def holds(state: StateReader, tensor: str) -> bool:
    """Whether ``state`` says that it has ``tensor``: for what only newer states have, or those of other jobs."""
    return isinstance(state, ListedReader) and tensor in state.tensors


def read_into(state: StateReader, wanted: Iterable[tuple[str, Box, torch.Tensor]]) -> None:
    """Fill each tensor with the box of ``state`` beside it, directly where the reader can."""
    if isinstance(state, DirectReader):
        state.read_into(wanted)
    else:
        for tensor, box, out in wanted:
            out.copy_(state.read(tensor, box))


@runtime_checkable
class PretrainedRecipe(Protocol):
    """A recipe that may start from weights on disk. Every worker must be able to read them."""

    def initial_state(self, job: JobConfig) -> StateReader | None:
        """The state before the first step, of step 0, or None to initialise afresh. Checks what can be checked
        without reading the weights, and raises :class:`planaria.config.ConfigError`."""
        ...


@runtime_checkable
class GroupedRecipe(Protocol):
    """A recipe that trains some parameters at another rate."""

    def lr_scale(self, name: str) -> float:
        """Factor on the learning rate of parameter ``name``."""
        ...


@runtime_checkable
class PartialLogitsRecipe(Protocol):
    """A recipe whose ``loss`` and ``score`` heed :func:`logits_part`: needed for context parallelism, and under tensor
    parallelism it spares the whole logits.

    ``loss`` then gives the sum over this rank's part of the sequence, and the same on all ranks that share the
    vocabulary; ``score`` gives whole rows on every rank.
    """

    partial_logits: bool


@runtime_checkable
class StagedRecipe(Protocol):
    """A recipe whose model can be cut into pipeline stages.

    ``loss`` and ``score`` must call the model they are given exactly once, before anything else that takes time: on
    a stage that is not the last, the call does not return.
    """

    def stage_rules(self, model: nn.Module) -> StageRules:
        """Where ``model`` may be cut."""
        ...

    def resume(self, model: nn.Module, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """What ``model(*args, **kwargs)`` returns, given ``hidden``, the input of the first layer that is there.

        Layers of other stages pass their input through, and so do the modules behind the last layer.
        """
        ...


@runtime_checkable
class ScoredRecipe(Protocol):
    """A recipe that can be scored on held-out samples.

    A sample that has an attribute ``choices`` (the answers that its question admits) is scored beside chance.
    """

    def score(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """One float64 number per row of ``batch``: 1 for a right answer, 0 for a wrong one."""
        ...


@dataclass(frozen=True)
class Contrast:
    """How pairs are told apart: the loss, and the parameters that it has of its own.

    With unit features I and T, the logit of image i and text j is ``exp(scale) * I_i . T_j + bias``.
    """

    kind: Literal["softmax", "sigmoid"]
    """``softmax``: CLIP (arXiv:2103.00020); ``sigmoid``: SigLIP (arXiv:2303.15343)."""
    scale: str
    """Name of the parameter, of shape (1,), that holds the logarithm of the logits' scale."""
    bias: str | None
    """Name of the bias parameter, of shape (1,); None: there is none."""
    columns: int
    """Most features of all ranks together that a rank compares its own with at a time."""


@runtime_checkable
class ContrastiveRecipe(Protocol):
    """A recipe whose targets are pairs, each told apart from all others of the global batch.

    Its batches hold ``weights`` [B]: a row of weight 0 is neither a positive nor a negative. ``loss`` is what one
    process would compute on the whole global batch; an engine that cuts the batch calls ``encode`` instead.
    """

    def encode(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Image and text features [B, D] of unit length, in at least float32; row i of each is pair i.

        A row must not depend on the others, and ``model`` must be called exactly once.
        """
        ...

    def contrast(self) -> Contrast:
        """The loss between the features."""
        ...


def is_scored(recipe: Recipe) -> bool:
    """Whether held-out samples can be scored: each by itself, or pairs by which one is found among all."""
    return isinstance(recipe, ScoredRecipe | ContrastiveRecipe)


@runtime_checkable
class BoundedRecipe(Protocol):
    """A recipe that keeps some parameters within bounds."""

    def bounds(self, name: str) -> tuple[float, float] | None:
        """Least and greatest value of parameter ``name`` after every update; None: it has none."""
        ...
