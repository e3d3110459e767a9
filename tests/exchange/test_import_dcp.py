"""From a directory that torch.distributed.checkpoint has saved to the first checkpoint of a run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.exchange.conftest import job_in, state_of, trained
from tests.support.ranks import RankPool
from tests.support.vlm import batches, engine_of
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from planaria.config import JobConfig
from planaria.engine.batches import to_device
from planaria.exchange.bring import bring
from planaria.exchange.contents import Contents
from planaria.exchange.errors import ExchangeError
from planaria.layout import Layout
from planaria.runtime.groups import Groups
from planaria.state.vault import Vault

STEPS = 2


def steps(model: Any, contents: Contents, count: int = STEPS) -> torch.optim.Optimizer:
    """Plain training of ``model`` by torch's AdamW."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    batch = to_device(batches(contents.recipe, contents.job, 0, 0, 1)[0], torch.device("cpu"))
    for _ in range(count):
        optimizer.zero_grad()
        contents.recipe.loss(model, batch).backward()
        optimizer.step()
    return optimizer


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def truth(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """What a checkpoint of Planaria must hold."""
    held = {"optim/updates": torch.tensor(STEPS)}
    for name, parameter in model.named_parameters():
        held[f"model/{name}"] = whole(parameter)
        if parameter.requires_grad:
            for kind in ("exp_avg", "exp_avg_sq"):
                held[f"optim/{kind}/{name}"] = whole(optimizer.state[parameter][kind])
    return held


def state_dict(model: Any, optimizer: Any, form: str) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    weights, moments = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer, options=options)
    if form == "flat":  # as torchtitan does: the model's own names on top
        train = {"step": torch.tensor(7, dtype=torch.int32), "ntokens_seen": torch.tensor(5)}
        return {**weights, "optimizer": moments, "train_state": train, "lr_scheduler": {"last_epoch": 7}}
    if form == "nested":
        return {"model": weights, "optim": moments, "step": 7}
    return {"app": {"model": weights, "optim": moments}}


def check(run: Path, step: int, expected: dict[str, torch.Tensor]) -> None:
    with Vault(run).at(step) as checkpoint:
        assert checkpoint.verify() == []
        assert set(checkpoint.tensors) == set(expected)
        for name, tensor in expected.items():
            got = checkpoint.read(name)
            assert got.dtype == tensor.dtype and torch.equal(got, tensor), name


@pytest.mark.parametrize(("form", "step"), [("flat", 7), ("nested", 7), ("app", STEPS)])
def test_one_process(preset: str, tmp_path: Path, form: str, step: int) -> None:
    job = job_in(tmp_path, preset)
    contents = Contents(job)
    model = trained(contents, state_of(job))
    optimizer = steps(model, contents)
    dcp.save(state_dict(model, optimizer, form), checkpoint_id=tmp_path / "dcp")
    done = bring(tmp_path / "dcp", job)
    assert (done.step, done.updates) == (step, STEPS)
    check(tmp_path / "run", step, truth(model, optimizer))


def _sharded(groups: Groups, job: JobConfig, folder: str, form: str) -> dict[str, torch.Tensor] | None:
    contents = Contents(job)
    model = trained(contents, state_of(job))
    for unit in contents.recipe.sharding(model).units:
        fully_shard(model.get_submodule(unit), mesh=groups.mesh["dp_shard"])
    fully_shard(model, mesh=groups.mesh["dp_shard"])
    optimizer = steps(model, contents)
    dcp.save(state_dict(model, optimizer, form), checkpoint_id=folder)
    held = truth(model, optimizer)  # collective
    return held if groups.mesh.get_rank() == 0 else None


@pytest.mark.parametrize(("ranks", "form"), [(2, "flat"), (3, "nested")])
def test_shards_of_several_processes(pool: RankPool, preset: str, tmp_path: Path, ranks: int, form: str) -> None:
    job = job_in(tmp_path, preset)
    expected = pool.run(Layout(dp_shard=ranks), _sharded, job, str(tmp_path / "dcp"), form)[0]
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == ranks
    done = bring(tmp_path / "dcp", job)
    assert (done.step, done.updates) == (7, STEPS)
    assert all(not note.startswith("no optimizer") for note in done.notes)
    check(tmp_path / "run", 7, expected)


def _goes_on(groups: Groups, job: JobConfig, step: int) -> tuple[int, int, bool]:
    engine = engine_of(groups, Contents(job).recipe, job)
    with Vault(Path(job.storage) / job.name).at(step) as checkpoint:
        engine.load(checkpoint)
        same = all(
            torch.equal(value, checkpoint.read(f"optim/{key}/{shard.name}", shard.box))
            for key, shard, value in engine.optimizer.state()
        )
    micro = batches(engine.recipe, job, step, engine.layout.dp_rank(engine.mesh.get_rank()), engine.layout.dp)
    engine.train_step(micro, 10)
    return engine.step_done, engine.optimizer.updates, same


def test_training_goes_on_from_it(pool: RankPool, tmp_path: Path) -> None:
    job = job_in(tmp_path)
    contents = Contents(job)
    model = trained(contents, state_of(job))
    dcp.save(state_dict(model, steps(model, contents), "flat"), checkpoint_id=tmp_path / "dcp")
    bring(tmp_path / "dcp", job)
    for got in pool.run(Layout(dp_shard=2), _goes_on, job, 7):
        assert got == (8, STEPS + 1, True)


def weights_only(tmp_path: Path, job: JobConfig, **extra: Any) -> dict[str, torch.Tensor]:
    model = trained(Contents(job), state_of(job))
    tensors = get_model_state_dict(model)
    dcp.save({"model": tensors, **extra}, checkpoint_id=tmp_path / "dcp")
    return tensors


def test_without_optimizer_state(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    weights_only(tmp_path, job)
    with pytest.raises(ExchangeError, match=r"does not say how many steps were done .* give --step N"):
        bring(tmp_path / "dcp", job)
    with pytest.raises(ExchangeError, match=r"step 21 lies beyond the end of the job, train\.steps=20"):
        bring(tmp_path / "dcp", job, 21)
    done = bring(tmp_path / "dcp", job, 20)
    assert (done.updates, done.notes) == (0, ("no optimizer state: moments begin at zero",))
    state = state_of(job)
    moments = {name: torch.zeros_like(tensor) for name, tensor in state.items() if name.startswith("optim/exp_avg")}
    check(tmp_path / "run", 20, state | moments | {"optim/updates": torch.tensor(0)})


def test_names_of_the_hub(preset: str, tmp_path: Path) -> None:
    job = job_in(tmp_path, preset)
    state, hub = state_of(job), Contents(job).names.to_hub()
    dcp.save({hub[name]: state[f"model/{name}"] for name in hub}, checkpoint_id=tmp_path / "dcp")
    assert bring(tmp_path / "dcp", job, 0).tensors == len(hub) + 1
    check(
        tmp_path / "run",
        0,
        {name: tensor for name, tensor in state.items() if name.startswith("model/")}
        | {"optim/updates": torch.tensor(0)},
    )


def test_fresh_optimizer_and_compiled_names(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    contents, state = Contents(job), state_of(job)
    model = trained(contents, state)
    optimizer = steps(model, contents)
    moments = get_optimizer_state_dict(model, optimizer)
    del moments["state"]["lm_head.weight"]
    tensors = {f"_orig_mod.{name}": tensor for name, tensor in get_model_state_dict(model).items()}
    dcp.save({"model": tensors, "optimizer": moments}, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(ExchangeError) as caught:
        bring(tmp_path / "dcp", job)
    trainable = len(contents.trainable)
    text = str(caught.value)
    assert f"missing optimizer state: 2 of {2 * trainable} tensors (exp_avg of lm_head.weight, " in text
    assert "--fresh-optimizer leaves the optimizer's state out" in text
    done = bring(tmp_path / "dcp", job, fresh_optimizer=True, step=2)
    assert done.updates == 0


@pytest.mark.parametrize("prefix", ["", "model.", "model._orig_mod.", "app.state.model.", "module."])
def test_prefixes_of_wrappers(tmp_path: Path, prefix: str) -> None:
    job = job_in(tmp_path)
    state = state_of(job)
    weights = {name: tensor for name, tensor in state.items() if name.startswith("model/")}
    dcp.save(
        {prefix + name.removeprefix("model/"): tensor for name, tensor in weights.items()},
        checkpoint_id=tmp_path / "dcp",
    )
    bring(tmp_path / "dcp", job, 0)
    check(tmp_path / "run", 0, weights | {"optim/updates": torch.tensor(0)})


def test_optimizer_state_of_another_optimizer(tmp_path: Path) -> None:
    job = job_in(tmp_path, optim={"name": "sgd", "momentum": 0.9})
    contents = Contents(job)
    model = trained(contents, state_of(job))
    dcp.save(state_dict(model, steps(model, contents), "nested"), checkpoint_id=tmp_path / "dcp")
    with pytest.raises(ExchangeError) as caught:
        bring(tmp_path / "dcp", job)
    assert "optimizer state exp_avg, exp_avg_sq: optim.name=sgd has no use for it" in str(caught.value)
    assert "missing optimizer state:" in str(caught.value)


def test_optimizer_state_by_number(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    contents = Contents(job)
    model = trained(contents, state_of(job))
    optimizer = steps(model, contents)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(ExchangeError, match=r"optimizer state by number: \d+ tensors .*get_optimizer_state_dict"):
        bring(tmp_path / "dcp", job)


def test_tied_weights_that_have_drifted_apart(tmp_path: Path) -> None:
    job = job_in(tmp_path, "llava-siglip-qwen-tiny")
    tensors = get_model_state_dict(trained(Contents(job), state_of(job)))
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"].clone()
    dcp.save(tensors, checkpoint_id=tmp_path / "same")
    bring(tmp_path / "same", job, 0)
    shutil.rmtree(tmp_path / "run")
    tensors["lm_head.weight"][0, 0] += 1
    dcp.save(tensors, checkpoint_id=tmp_path / "apart")
    with pytest.raises(ExchangeError, match=r"differ, but are one tensor in the job's model .*tie_word_embeddings"):
        bring(tmp_path / "apart", job, 0)
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_another_model_and_a_stranger(tmp_path: Path) -> None:
    weights_only(tmp_path, job_in(tmp_path), ema={"shadow": torch.ones(3)})
    with pytest.raises(ExchangeError) as caught:
        bring(tmp_path / "dcp", job_in(tmp_path, "llava-siglip-qwen-tiny"), 0)
    for part in ("missing: ", "no place for: ", "another shape: ", "ema.shadow"):
        assert part in str(caught.value)
    with pytest.raises(ExchangeError, match=r"no place for: 1 tensors \(ema\.shadow\)"):
        bring(tmp_path / "dcp", job_in(tmp_path), 0)
    bring(tmp_path / "dcp", job_in(tmp_path), 0, ignore=["ema.*"])
