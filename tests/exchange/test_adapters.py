"""Adapters out of a checkpoint: merged, and by themselves, as transformers and peft read them."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from tests.support.vlm import batches, vlm_job
from transformers import AutoModelForImageTextToText

from planaria.engine.batches import to_device
from planaria.exchange.adapters import export_adapters
from planaria.exchange.contents import Contents
from planaria.exchange.errors import ExchangeError
from planaria.exchange.exporting import export
from planaria.models.lora import is_adapter
from planaria.models.vlm import VLMRecipe
from planaria.state.boxes import Box
from planaria.state.vault import Vault
from planaria.state.writer import Piece


def test_both_exports_compute_what_the_trained_model_does(tmp_path: Path) -> None:
    job = vlm_job(model__lora={"rank": 2, "alpha": 6.0}, model__freeze=["vision"], train__precision="fp32")
    recipe = VLMRecipe(job)
    contents = Contents(job)
    trained = recipe.build_model()
    torch.manual_seed(0)
    writer = Vault(tmp_path / "run").writer(0, "one")
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.5 if is_adapter(name) else 0.1))
    pieces = [
        Piece(f"model/{name}", tuple(p.shape), Box.whole(p.shape), p.detach()) for name, p in trained.named_parameters()
    ]
    writer.commit(writer.write_shard(0, pieces), {"layout": "single"})
    with Vault(tmp_path / "run").at(0) as checkpoint:
        export(checkpoint, contents, tmp_path / "merged")
        export_adapters(checkpoint, contents, tmp_path / "adapters")
        with pytest.raises(ExchangeError, match="trains no adapters"):
            export_adapters(checkpoint, contents.plain, tmp_path / "none")
    plain = recipe.plain_model()
    whole = dict(trained.named_parameters())
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            owner, _, leaf = name.rpartition(".")
            parameter.copy_(whole.get(name, whole.get(f"{owner}.base_layer.{leaf}")))  # type: ignore[arg-type]
    adapted = peft.PeftModel.from_pretrained(plain, str(tmp_path / "adapters"))  # type: ignore[arg-type]
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")
    (batch, *_) = batches(recipe, job, 0, 0, 1)
    tensors = to_device(batch, torch.device("cpu"))
    with torch.no_grad():
        expected, *found = (float(recipe.loss(model.eval(), tensors)) for model in (trained, adapted, loaded))
    assert found == pytest.approx([expected] * 2, rel=1e-5)
    with torch.no_grad(), adapted.disable_adapter():
        assert float(recipe.loss(adapted, tensors)) != pytest.approx(expected, rel=1e-3), "the adapters matter"
