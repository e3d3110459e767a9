"""From a checkpoint to a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests.exchange.conftest import job_in, overwrite, save, state_of, trained
from tests.support.vlm import batches
from transformers import AutoModelForImageTextToText, AutoTokenizer, ByT5Tokenizer, LlavaForConditionalGeneration

from planaria.engine.batches import to_device
from planaria.exchange import folder as folders
from planaria.exchange.contents import Contents
from planaria.exchange.errors import ExchangeError
from planaria.exchange.exporting import Exported, export
from planaria.state.errors import CheckpointDamaged
from planaria.state.vault import Vault


def export_run(run: Path, contents: Contents, to: Path, dtype: str = "fp32", **options: Any) -> Exported:
    with Vault(run).at(10) as checkpoint:
        return export(checkpoint, contents, to, dtype, **options)


def inputs(contents: Contents) -> dict[str, torch.Tensor]:
    tensors = to_device(batches(contents.recipe, contents.job, 0, 0, 1)[0], torch.device("cpu"))
    return {key: tensor for key, tensor in tensors.items() if key != "labels"}


def names_in(folder: Path) -> dict[str, tuple[int, ...]]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(str(file), framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            found |= {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("max_file_bytes", [5 * 10**9, 200_000])
def test_from_pretrained_gives_the_same_logits(preset: str, tmp_path: Path, max_file_bytes: int) -> None:
    job = job_in(tmp_path, preset)
    contents, state = Contents(job), state_of(job)
    done = export_run(save(job, state), contents, tmp_path / "hf", max_file_bytes=max_file_bytes)
    index = tmp_path / "hf/model.safetensors.index.json"
    assert (done.files > 1) == index.exists() == (max_file_bytes < 10**6)
    own = trained(contents, state)
    for cls in (LlavaForConditionalGeneration, AutoModelForImageTextToText):
        loaded, info = cls.from_pretrained(tmp_path / "hf", output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        assert type(loaded) is LlavaForConditionalGeneration and loaded.dtype == torch.float32
        loaded.eval()
        with torch.no_grad():
            batch = inputs(contents)
            assert torch.equal(loaded(**batch).logits, own(**batch).logits)
        parameters = dict(loaded.named_parameters())
        for name in contents.parameters:
            assert torch.equal(parameters[name], state[f"model/{name}"]), name


def test_names_and_config_are_those_of_save_pretrained(preset: str, tmp_path: Path) -> None:
    job = job_in(tmp_path, preset)
    contents, state = Contents(job), state_of(job)
    done = export_run(save(job, state), contents, tmp_path / "hf")
    trained(contents, state).save_pretrained(tmp_path / "theirs")
    assert names_in(tmp_path / "hf") == names_in(tmp_path / "theirs")
    assert done.tensors == len(names_in(tmp_path / "hf"))
    mine, theirs = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "theirs"))
    assert mine == theirs
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("hf", "theirs")]
    assert abs(sizes[0] - sizes[1]) < 100  # tied embeddings once


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_other_dtypes(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    job = job_in(tmp_path, train__precision="fp64")
    contents, state = Contents(job), state_of(job)
    export_run(save(job, state), contents, tmp_path / "hf", name)
    loaded = LlavaForConditionalGeneration.from_pretrained(tmp_path / "hf", dtype="auto")
    for key, parameter in loaded.named_parameters():
        assert parameter.dtype == dtype
        assert torch.equal(parameter, state[f"model/{key}"].to(dtype))


def test_a_weight_that_half_precision_cannot_hold(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    state = state_of(job)
    state["model/lm_head.weight"][3, 3] = 70000.0
    run = save(job, state)
    with pytest.raises(ExchangeError, match=r"lm_head\.weight: its largest value 7e\+04 does not fit torch\.float16"):
        export_run(run, Contents(job), tmp_path / "hf", "fp16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    export_run(run, Contents(job), tmp_path / "hf", "bf16")


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    export_run(save(job, state_of(job)), Contents(job), tmp_path / "hf")
    codec = Contents(job).recipe.codec
    tokenizer = ByT5Tokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("a picture of ü").input_ids == codec.tokenizer("a picture of ü").input_ids
    assert tokenizer.convert_tokens_to_ids("<extra_id_0>") == codec.image_id
    generation = json.loads((tmp_path / "hf/generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (codec.eos_id, codec.pad_id)


def test_what_the_model_came_with_comes_along(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    export_run(save(job, state_of(job)), Contents(job), tmp_path / "first")
    (tmp_path / "first/preprocessor_config.json").write_text('{"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 1, 1]}')
    (tmp_path / "first/generation_config.json").write_text('{"max_new_tokens": 7}')
    (tmp_path / "first/notes.txt").write_text("mine")
    path = str(tmp_path / "first")
    again = job_in(tmp_path, model={"path": path}, name="again")
    export_run(save(again, state_of(again, 2)), Contents(again), tmp_path / "second")
    for name in ("preprocessor_config.json", "generation_config.json"):
        assert (tmp_path / "second" / name).read_bytes() == (tmp_path / "first" / name).read_bytes()
    assert not (tmp_path / "second/notes.txt").exists()


def tokenizer_directory(folder: Path, *, image: bool) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "</s>", "<unk>", *(["<image>"] if image else []), *"abcdefgh"]
    inner = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    extra = {"additional_special_tokens": ["<image>"]} if image else {}
    PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="</s>", pad_token="<pad>", unk_token="<unk>", **extra
    ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("image", [True, False])
def test_a_tokenizer_of_ones_own_comes_along_with_its_image_token(tmp_path: Path, image: bool) -> None:
    own = tokenizer_directory(tmp_path / "tokenizer", image=image)
    job = job_in(tmp_path, data={"tokenizer": str(own)})
    contents = Contents(job)
    export_run(save(job, state_of(job)), contents, tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.convert_tokens_to_ids("<image>") == contents.recipe.codec.image_id
    assert len(tokenizer) == contents.recipe.codec.vocab_size
    if image:
        assert (tmp_path / "hf/tokenizer.json").read_bytes() == (own / "tokenizer.json").read_bytes()


def test_damage_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    run = save(job, state_of(job))
    shard = run / "checkpoints/step-00000010/shard-00001.safetensors"
    with Vault(run).at(10) as checkpoint:
        slices = checkpoint.index.tensors["model/lm_head.weight"]
    overwrite(shard, next(item.key for item in slices if item.file == shard.name))
    (tmp_path / "hf").mkdir()
    with pytest.raises(
        CheckpointDamaged, match=r"shard-00001\.safetensors: slice model/lm_head\.weight\[192:384,0:96\]"
    ):
        export_run(run, Contents(job), tmp_path / "hf")
    assert not list((tmp_path / "hf").iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]


def test_an_existing_target(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    run, contents, to = save(job, state_of(job)), Contents(job), tmp_path / "hf"
    to.mkdir()
    export_run(run, contents, to)  # empty
    with pytest.raises(ExchangeError, match=r"hf: exists and is not empty; give another --to, or --force"):
        export_run(run, contents, to)
    (to / "model.safetensors").write_bytes(b"old")
    export_run(run, contents, to, force=True)
    assert (to / "model.safetensors").stat().st_size > 1000
    (to / "sub").mkdir()
    with pytest.raises(ExchangeError, match=r"does not look like an exported model \(it holds the folder sub\)"):
        export_run(run, contents, to, force=True)
    (to / "sub").rmdir()
    (to / "config.json").unlink()
    with pytest.raises(ExchangeError, match=r"does not look like an exported model \(it holds no config\.json\)"):
        export_run(run, contents, to, force=True)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ExchangeError, match=r"file: exists and is no folder"):
        export_run(run, contents, file, force=True)
    assert not list(tmp_path.glob(".*"))


def test_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_in(tmp_path)
    run = save(job, state_of(job))
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ExchangeError, match=r"hf: no space: \d+ bytes needed, 1000 bytes free"):
        export_run(run, Contents(job), tmp_path / "hf")
    monkeypatch.undo()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "x"))

    monkeypatch.setattr("planaria.exchange.exporting.write_files", full)
    with pytest.raises(ExchangeError, match=r"x: no space left, \d+ bytes needed; nothing is left"):
        export_run(run, Contents(job), tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_another_model(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    run = save(job, state_of(job))
    with pytest.raises(ExchangeError) as caught:
        export_run(run, Contents(job_in(tmp_path, "llava-siglip-qwen-tiny")), tmp_path / "hf")
    for part in ("are missing (model.", "have no place in it (", "have another shape (", "--config"):
        assert part in str(caught.value)


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    with pytest.raises(ExchangeError, match="has no model section"):
        Contents(job.model_copy(update={"model": None}))
