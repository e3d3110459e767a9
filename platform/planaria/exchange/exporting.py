"""From a checkpoint to a Hugging Face directory, one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from planaria.exchange.adapters import merged
from planaria.exchange.companions import write_companions
from planaria.exchange.contents import Contents
from planaria.exchange.errors import ExchangeError, some
from planaria.exchange.folder import appearing, check_target
from planaria.exchange.weights import plan_files, write_files
from planaria.models.hub_names import MustBeConverted
from planaria.models.pretrained import PretrainedState
from planaria.state.checkpoint import Checkpoint

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MAX_FILE_BYTES = 5 * 10**9
"""Largest weights file, unless a single tensor is larger."""


@dataclass(frozen=True)
class Exported:
    """What an export has written."""

    path: Path
    step: int
    tensors: int
    files: int
    nbytes: int


def export(
    checkpoint: Checkpoint,
    contents: Contents,
    to: str | Path,
    dtype: str = "fp32",
    *,
    force: bool = False,
    max_file_bytes: int = MAX_FILE_BYTES,
    progress: Callable[[int], None] = lambda _: None,
) -> Exported:
    """Write the model of ``checkpoint`` as the directory ``to``, which ``from_pretrained`` loads.

    Adapters are merged into the weights. Every slice is checked against its checksum as it is read. The directory
    appears when it is complete.

    Args:
        contents: of the job that wrote the checkpoint.
        dtype: of all weights: fp32, bf16 or fp16.
        force: replace an exported model that is at ``to``.
        progress: told the bytes written of each tensor.

    Raises:
        CheckpointDamaged: a slice is not what was written.
        ExchangeError: the checkpoint is of another model, ``to`` cannot be used, or a weight does not fit ``dtype``.
    """
    if dtype not in DTYPES:
        raise ExchangeError(f"dtype {dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
    if max_file_bytes < 1:
        raise ExchangeError(f"a largest file of {max_file_bytes} bytes holds nothing; give at least 1")
    target, to_dtype = Path(to).expanduser().absolute(), DTYPES[dtype]
    check_target(target, force)
    _check_model(checkpoint, contents)
    plain = contents.plain
    own = {key: name for name, key in _hub_names(plain).items()}
    shapes = {key: plain.hub_shape(own[key]) for key in sorted(own)}
    planned = plan_files(shapes, to_dtype, max_file_bytes)

    def read(key: str) -> torch.Tensor:
        tensor = _cast(merged(checkpoint, contents, own[key]), to_dtype, own[key]).reshape(shapes[key])
        progress(tensor.nbytes)
        return tensor

    with appearing(target, force, planned.total) as folder:
        write_companions(folder, plain.job, plain.model, plain.recipe.codec, to_dtype)
        write_files(folder, planned, shapes, to_dtype, read)
        _check_names(folder, plain, own)
    return Exported(target, checkpoint.step, len(own), len(planned.files), planned.total)


def _hub_names(contents: Contents) -> dict[str, str]:
    try:
        return contents.names.to_hub()
    except MustBeConverted as error:
        raise ExchangeError(
            f"{type(contents.model).__name__}: transformers stores {len(error.names)} of its tensors in another form "
            f"({some(error.names)}), which this version does not export"
        ) from None


def _check_model(checkpoint: Checkpoint, contents: Contents) -> None:
    held = {name.partition("/")[2]: name for name in checkpoint.tensors if name.startswith("model/")}
    wanted = contents.parameters
    problems = []
    if missing := [name for name in wanted if name not in held]:
        problems.append(f"{len(missing)} are missing ({some(missing)})")
    if surplus := [name for name in held if name not in wanted]:
        problems.append(f"{len(surplus)} have no place in it ({some(surplus)})")
    if other := [
        f"{name} {list(checkpoint.global_shape(held[name]))} for {list(shape)}"
        for name, shape in wanted.items()
        if name in held and checkpoint.global_shape(held[name]) != shape
    ]:
        problems.append(f"{len(other)} have another shape ({some(other)})")
    if problems:
        raise ExchangeError(
            f"{checkpoint.path}: its tensors are not those of the job's model: {'; '.join(problems)}; "
            "give the job that trained it with --config"
        )


def _cast(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    cast = tensor.to(dtype)
    if bool(cast.isinf().any()) and not bool(tensor.isinf().any()):
        raise ExchangeError(
            f"{name}: its largest value {tensor.abs().max().item():.3g} does not fit {dtype}; "
            "export with --dtype bf16 or fp32"
        )
    return cast


def _check_names(folder: Path, contents: Contents, own: dict[str, str]) -> None:
    """Read the directory's names and shapes back as a training job would, before anyone sees it."""
    state = PretrainedState(str(folder), contents.model)
    if wrong := [name for key, name in own.items() if state.source(name) != key]:
        raise ExchangeError(
            f"{type(contents.model).__name__}: the names that transformers writes and reads differ for "
            f"{len(wrong)} tensors ({some(wrong)}); this version of transformers cannot be used for an export"
        )
