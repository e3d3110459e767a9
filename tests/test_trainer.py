"""What the trainer says about a job that ended, without Ray's processes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import ray
import ray.train

from planaria import trainer as module
from planaria.config import ConfigError, parse
from planaria.trainer import ElasticTrainer, TrainingFailed, TrainingStopped, stop_message


@pytest.fixture
def trainer(tmp_path) -> ElasticTrainer:
    model = {"preset": "llava-tiny"}
    return ElasticTrainer(parse({"model": model, "train": {"steps": 4, "global_batch": 4}, "storage": str(tmp_path)}))


class Talk:
    """A controller whose every method is called in vain."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self


def test_a_stop_names_its_checkpoint_or_that_there_is_none() -> None:
    assert "of step 3" in stop_message({"steps": 4, "checkpoint_step": 3}, 9)
    assert "begins anew" in stop_message({"steps": 0, "checkpoint_step": None}, 9)


@pytest.mark.parametrize(("signals", "how"), [(["SIGTERM"], "after waiting 0 s"), (["SIGTERM", "Ctrl-C"], "at once")])
def test_an_end_without_a_checkpoint_says_how_it_came(trainer, monkeypatch, signals: list[str], how: str) -> None:
    monkeypatch.setattr(module, "_signals", lambda: nullcontext(signals))
    monkeypatch.setattr(module, "STOP_LIMIT_S", 0.0)
    monkeypatch.setattr(ray, "wait", lambda *_, **__: ([], []))
    monkeypatch.setattr(ray, "get", lambda *_, **__: {})
    with pytest.raises(TrainingStopped, match=how) as caught:
        trainer._attend(Talk())
    assert caught.value.by == "SIGTERM"


def test_a_lost_controller_is_a_failed_training(trainer, monkeypatch) -> None:
    def lost(_: Any) -> dict[str, Any]:
        raise ray.exceptions.ActorDiedError

    monkeypatch.setattr(trainer, "_attend", lost)
    monkeypatch.setattr(module, "actor_class", lambda *_, **__: Talk())
    monkeypatch.setattr(module, "NodeAffinitySchedulingStrategy", lambda *_, **__: None)
    monkeypatch.setattr(ray, "get_runtime_context", Talk)
    swept: list[str] = []
    monkeypatch.setattr(module.takeover, "take_over", lambda _: None)
    monkeypatch.setattr(module.takeover, "sweep", swept.append)
    monkeypatch.setattr(ray, "cluster_resources", dict)
    with pytest.raises(TrainingFailed, match="the controller failed"):
        trainer._run(None)
    assert len(swept) == 1


def test_workers_take_gpus_where_there_are_some_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    tree: dict[str, Any] = {"model": {"preset": "llava-tiny"}, "train": {"steps": 4, "global_batch": 4}}
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 2.0})
    on_gpu = module._scaling(None, parse(tree))
    assert on_gpu.use_gpu
    assert on_gpu.resources == {"CPU": 1.0, "GPU": 1.0}
    assert not module._scaling(None, parse(tree | {"resources": {"device": "cpu"}})).use_gpu
    assert not module._scaling(ray.train.ScalingConfig(num_workers=2), parse(tree)).use_gpu
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0})
    assert not module._scaling(None, parse(tree)).use_gpu
    forced = module._scaling(None, parse(tree | {"resources": {"device": "cuda", "gpus": 0.5, "cpus": 2}}))
    assert forced.resources == {"CPU": 2.0, "GPU": 0.5}


def test_options_that_would_be_ignored_are_refused() -> None:
    tree = {"model": {"preset": "llava-tiny"}, "train": {"steps": 4, "global_batch": 4}}
    scaling = ray.train.ScalingConfig(num_workers=1, use_gpu=True, accelerator_type="A100")
    with pytest.raises(ConfigError, match=r"scaling_config\.accelerator_type.*not supported"):
        ElasticTrainer(tree, scaling)
    run = ray.train.RunConfig(worker_runtime_env={"env_vars": {"A": "b"}})
    with pytest.raises(ConfigError, match=r"run_config\.worker_runtime_env"):
        ElasticTrainer(tree, run_config=run)
