"""Which tensor of a source is which tensor of a checkpoint. Names and shapes only: nothing is read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from planaria.exchange.contents import Contents
from planaria.exchange.errors import ExchangeError, some
from planaria.models.hub_names import HubNames, MustBeConverted

KINDS = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""Optimizer state that torch's AdamW and SGD have."""
_OPTIMIZER = re.compile(rf"(?:.*\.)?state\.(?P<name>.+)\.(?P<kind>{'|'.join(KINDS)})")
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
_BESIDE = frozenset(
    [
        "train_state",
        "dataloader",
        "data_loader",
        "lr_scheduler",
        "lr_schedulers",
        "scheduler",
        "step",
        "global_step",
        "epoch",
        "rng",
        "rng_state",
    ]
)
"""First parts of names that trainers give to what is neither model nor optimizer."""


@dataclass
class Match:
    """What is where in the source.

    Attributes:
        model: by name of the parameter, its tensor there and those that must equal it (tied weights saved twice).
        optimizer: by (kind, name of the parameter).
        steps: the optimizer's own count of updates, one per parameter.
        passed_over: tensors that are not needed.
    """

    model: dict[str, list[str]] = field(default_factory=dict)
    optimizer: dict[tuple[str, str], str] = field(default_factory=dict)
    steps: list[str] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)


def match(
    shapes: Mapping[str, tuple[int, ...]],
    contents: Contents,
    label: str,
    *,
    ignore: Sequence[str] = (),
    fresh_optimizer: bool = False,
) -> Match:
    """Find every tensor that a checkpoint of the job needs.

    Args:
        shapes: of the source's tensors, by name.
        label: the source, for messages.
        ignore: globs of tensors to pass over.
        fresh_optimizer: want no optimizer state.

    Raises:
        ExchangeError: lists all that is missing, has no place, or has another shape.
    """
    result = Match()
    unexpected: list[str] = []
    keys = [key for key in shapes if not any(fnmatchcase(key, glob) for glob in ignore)]
    states = {key: found for key in keys if (found := _OPTIMIZER.fullmatch(key))}
    prefix = _prefix([key for key in keys if key not in states], contents.names)
    for key in keys:
        if key in states:
            continue
        name = _resolve(key, prefix, contents.names)
        if name is not None:
            result.model.setdefault(name, []).append(key)
        elif key.partition(".")[0] in _BESIDE or contents.names.meaningless(_bare(key, prefix)):
            result.passed_over.append(key)
        else:
            unexpected.append(key)
    for key, found in states.items():
        kind, raw = found["kind"], found["name"]
        name = _resolve(raw, "", contents.names) or _resolve(raw, prefix, contents.names)
        if fresh_optimizer:
            result.passed_over.append(key)
        elif name is None:
            unexpected.append(key)
        elif name not in contents.trainable:
            result.passed_over.append(key)
        elif kind == "step":
            result.steps.append(key)
        else:
            result.optimizer[kind, name] = key
    problems = [*_problems(result, shapes, contents), *_unplaced(unexpected)]
    if problems:
        raise ExchangeError(
            f"{label}: does not fit the job's model"
            + "".join(f"\n  {problem}" for problem in problems)
            + f"\n{_remedy(result, unexpected)}"
        )
    return result


def _bare(key: str, prefix: str) -> str:
    """``key`` without what wrappers of a module put into it, and without ``prefix``."""
    return _WRAPPERS.sub("", key).removeprefix(prefix).removeprefix("module.")


def _resolve(key: str, prefix: str, names: HubNames) -> str | None:
    """The (first) name of the parameter that ``key`` is, by its name in the module or in a file of the hub."""
    if not _WRAPPERS.sub("", key).startswith(prefix):
        return None
    bare = _bare(key, prefix)
    if bare in names.first:
        return names.first[bare]
    try:
        found = names.to_module(bare)
    except MustBeConverted:
        raise ExchangeError(
            f"{key}: must be converted, not only renamed, to become a parameter of the model; load the weights with "
            "this version of transformers, save_pretrained() them, and import the result"
        ) from None
    return None if found is None else names.first.get(found)


def _prefix(keys: Sequence[str], names: HubNames) -> str:
    """What stands before the names of the model's tensors: the choice under which most are recognised."""
    choices = {"": 0, "model.": 0}
    for key in (_WRAPPERS.sub("", key) for key in keys):
        for name in names.first:
            if key.endswith(f".{name}"):
                choices.setdefault(key.removesuffix(name), 0)
                break
    for prefix in choices:
        choices[prefix] = sum(_resolve(key, prefix, names) is not None for key in keys)
    return max(choices, key=lambda prefix: (choices[prefix], -len(prefix)))


def _problems(found: Match, shapes: Mapping[str, tuple[int, ...]], contents: Contents) -> Iterable[str]:
    wanted = contents.parameters
    if missing := [name for name in wanted if name not in found.model]:
        yield f"missing: {len(missing)} of {len(wanted)} tensors ({some(missing)})"
    if found.optimizer or found.steps:
        needed = [(kind, name) for name in wanted if name in contents.trainable for kind in contents.optimizer_keys]
        if lacking := [f"{kind} of {name}" for kind, name in needed if (kind, name) not in found.optimizer]:
            yield f"missing optimizer state: {len(lacking)} of {len(needed)} tensors ({some(lacking)})"
        foreign = sorted({kind for kind, _ in found.optimizer} - set(contents.optimizer_keys))
        if foreign:
            yield f"optimizer state {', '.join(foreign)}: optim.name={contents.job.optim.name} has no use for it"
    both = [(key, name) for name, keys in found.model.items() for key in keys]
    both += [(key, name) for (_, name), key in found.optimizer.items()]
    other = [
        f"{key} {list(shapes[key])} for {list(contents.hub_shape(name))}"
        for key, name in both
        if shapes[key] not in (wanted[name], contents.hub_shape(name))
    ]
    if other:
        yield f"another shape: {len(other)} tensors ({some(other)})"


def _unplaced(unexpected: Sequence[str]) -> Iterable[str]:
    numbered = [key for key in unexpected if (state := _OPTIMIZER.fullmatch(key)) and state["name"].isdigit()]
    if numbered:
        yield (
            f"optimizer state by number: {len(numbered)} tensors ({some(numbered)}); save it with "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, which gives names"
        )
    if rest := [key for key in unexpected if key not in numbered]:
        yield f"no place for: {len(rest)} tensors ({some(rest)})"


def _remedy(found: Match, unexpected: Sequence[str]) -> str:
    parts = ["is the model section of the job the one of these weights?"]
    if found.optimizer or found.steps or any(_OPTIMIZER.fullmatch(key) for key in unexpected):
        parts.append("--fresh-optimizer leaves the optimizer's state out")
    if unexpected:
        parts.append("--ignore PATTERN passes tensors over")
    return "; ".join(parts)
