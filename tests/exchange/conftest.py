"""Checkpoints of tiny models, as a run would have left them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import RankPool
from tests.support.vlm import vlm_job
from torch import Tensor

from planaria.config import JobConfig
from planaria.exchange.contents import Contents
from planaria.layout import Layout
from planaria.state.boxes import Box, shard_rows
from planaria.state.vault import Vault
from planaria.state.writer import Piece

PRESETS = ("llava-tiny", "llava-siglip-qwen-tiny")


def job_in(storage: Path, preset: str = "llava-tiny", **overrides: Any) -> JobConfig:
    """A float32 job that keeps its run under ``storage``."""
    return vlm_job(preset, **({"train__precision": "fp32", "storage": str(storage), "name": "run"} | overrides))


def state_of(job: JobConfig, seed: int = 1) -> dict[str, Tensor]:
    """Random values for every tensor of a checkpoint of ``job``."""
    torch.manual_seed(seed)
    contents = Contents(job)
    state = {name: torch.randn(shape).to(contents.dtype) * 0.05 for name, shape in contents.expected().items() if shape}
    for name in state:
        if "exp_avg_sq" in name:
            state[name].abs_()
    return state | {"optim/updates": torch.tensor(9)}


def save(job: JobConfig, state: dict[str, Tensor], step: int = 10, ranks: int = 2) -> Path:
    """A checkpoint of ``state``, cut in rows over ``ranks``; gives the run directory."""
    run = Path(job.storage) / job.name
    writer = Vault(run).writer(step, "t")
    slices = []
    for rank in range(ranks):
        pieces = []
        for name, tensor in state.items():
            shape = tuple(tensor.shape)
            box = shard_rows(shape, rank, ranks) if shape else Box.whole(())
            if shape or rank == 0:
                pieces.append(Piece(name, shape, box, tensor[box.relative_to(Box.whole(shape))].contiguous()))
        slices += writer.write_shard(rank, pieces)
    meta = {"layout": str(Layout(dp_shard=ranks)), "job": job.model_dump(mode="json")}
    writer.commit(slices, meta, expected=Contents(job).expected())
    return run


def trained(contents: Contents, state: dict[str, Tensor]) -> Any:
    """The model that a training process holds, with the weights of ``state``."""
    model = contents.recipe.build_model().to(contents.dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[f"model/{name}"])
    return model.eval()


@pytest.fixture(params=PRESETS)
def preset(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def overwrite(file: Path, key: str) -> None:
    """Damage the first bytes of tensor ``key`` in a safetensors file."""
    raw = bytearray(file.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    start = 8 + length + json.loads(raw[8 : 8 + length])[key]["data_offsets"][0]
    raw[start : start + 4] = bytes(byte ^ 1 for byte in raw[start : start + 4])
    file.write_bytes(raw)


@pytest.fixture(scope="package")
def pool() -> Iterator[RankPool]:
    """Ranks for what only an engine can tell."""
    with RankPool(4) as ranks:
        yield ranks
