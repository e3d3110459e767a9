"""Every way to get a job description wrong, and what its author is told."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.config import ConfigError, JobConfig, load, parse, vault_root
from planaria.paths import absolute_paths

MINIMAL = "model: {preset: llava-tiny}\ntrain: {steps: 100, global_batch: 8}\n"


@pytest.fixture
def job(tmp_path: Path):
    """Load a job from text and overrides."""

    def load_text(text: str = MINIMAL, *overrides: str) -> JobConfig:
        path = tmp_path / "job.yaml"
        path.write_text(text)
        return load(path, overrides)

    return load_text


@pytest.fixture
def complaint(job, tmp_path: Path):
    """The error of a faulty job, the folder cut from the file name."""

    def of(text: str = MINIMAL, *overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            job(text, *overrides)
        return str(caught.value).replace(f"{tmp_path}/", "")

    return of


def test_minimal_job_has_defaults(job):
    config = job()
    assert config.model.preset == "llava-tiny"
    assert config.optim.betas == (0.9, 0.95)
    assert config.data.source == "scenes"
    assert config.elastic.max_failures == 3


def test_sections_are_immutable(job):
    with pytest.raises(Exception, match="frozen"):
        job().train.steps = 3


def test_empty_section_counts_as_left_out(job):
    assert job(MINIMAL + "data:\noptim:\n  schedule:\n") == job()


def test_the_model_section_may_be_left_out_for_a_recipe_of_ones_own(job):
    config = job("train: {steps: 2, global_batch: 8}\n")
    assert config.model is None
    assert job("model:\ntrain: {steps: 2, global_batch: 8}\n") == config
    assert parse(config.model_dump(mode="json")) == config
    assert job("train: {steps: 2, global_batch: 8}\n", "model.preset=a").model.preset == "a"


# Files


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such file; give the path of a job file"):
        load(tmp_path / "nowhere.yaml")


def test_folder(tmp_path):
    with pytest.raises(ConfigError, match="is a folder; give the path of a job file"):
        load(tmp_path)


def test_unreadable_file(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ConfigError, match=r"job\.yaml: cannot be read \(Permission denied\); check its permissions"):
        load(tmp_path / "job.yaml")


def test_binary_file(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_bytes(b"model: \xff\xfe")
    with pytest.raises(ConfigError, match=r"not UTF-8 text \(byte 7\)"):
        load(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: [1, 2\n", "job.yaml: not valid YAML, line 2, column 1: "),
        ("model: {preset: a}\n\tx: 1\n", "job.yaml: not valid YAML, line 2, column 1: "),
        ("train: !!python/object/apply:os.system ['true']\n", "job.yaml: not valid YAML, line 1, column 8: "),
        ("", "job.yaml: is empty; it needs at least the sections model: and train:"),
        ("# nothing\n", "job.yaml: is empty"),
        ("- model\n", "job.yaml: expected a mapping of sections (model:, train:, ...), found ['model']"),
        ("model\n", "job.yaml: expected a mapping of sections (model:, train:, ...), found 'model'"),
        (MINIMAL + "model: {}\n", "line 3, column 1: the key 'model' stands twice in one section; keep one of them"),
        ("train: {steps: 1, steps: 2}\n", "line 1, column 19: the key 'steps' stands twice"),
    ],
)
def test_unusable_file(complaint, text, expected):
    assert expected in complaint(text)


def test_merge_keys_are_not_duplicates(job):
    assert (
        job(
            MINIMAL + "optim: {schedule: {<<: {warmup_steps: 1, kind: cosine}, kind: linear}}"
        ).optim.schedule.warmup_steps
        == 1
    )


# Keys


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("optim.lrr=1", "did you mean optim.lr?"),
        ("optim.LR=1", "did you mean optim.lr?"),
        ("optim.weight-decay=1", "did you mean optim.weight_decay?"),
        ("optimizer.lr=1", "did you mean optim?"),
        ("lr=1", "did you mean optim.lr?"),
        ("train.lr=1", "did you mean optim.lr?"),
        ("steps=1", "did you mean train.steps?"),
        ("warmup_step=1", "did you mean optim.schedule.warmup_steps?"),
        ("data.scenes.colors=3", "did you mean data.scenes.colours?"),
        (
            "layout.qqq=1",
            "remove it, or use one of the keys known here: cp, dp_replicate, pipeline_schedule, pp, sequence_parallel, "
            "tp, virtual_stages",
        ),
        ("model.path.x=1", "expected text"),
    ],
)
def test_unknown_key_names_flag_value_and_nearest(complaint, override, remedy):
    message = complaint(MINIMAL, override)
    assert message.startswith(f"--set {override}: {override.split('=')[0].split('.')[0]}")
    assert remedy in message


def test_unknown_key_in_file(complaint):
    expected = "job.yaml: optim.lrr: unknown key (value 0.1); did you mean optim.lr?"
    assert complaint(MINIMAL + "optim: {lrr: 0.1}\n") == expected


def test_unknown_section_is_shown_by_its_keys(complaint):
    message = complaint(MINIMAL + "optimiser: {lr: 0.1, name: sgd}\n")
    assert message == "job.yaml: optimiser: unknown key (value a section with lr, name); did you mean optim?"


def test_key_that_is_no_text(complaint):
    assert "job.yaml: 1: unknown key, not even text; remove it" in complaint(MINIMAL + "1: 2\n")


def test_missing_keys(complaint):
    message = complaint("model: {preset: a}\ntrain: {micro_batch: 1}\n")
    assert message.splitlines() == [
        "job.yaml: train.steps: missing; add it",
        "job.yaml: train.global_batch: missing (samples per optimizer step, whatever the number of workers); add it",
    ]
    assert complaint("model: {preset: a}\n") == "job.yaml: train: missing; add it"
    assert complaint("model: {preset: a}\ntrain:\n") == message


def test_long_values_are_cut(complaint):
    message = complaint(MINIMAL, f"train.steps={'x' * 500}")
    assert len(message.partition(": train.steps: ")[2]) < 150


# Types and ranges


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps=true", "true is not acceptable; expected a whole number"),
        ("train.steps=2.5", "2.5 is not acceptable; expected a whole number"),
        ("train.steps='5'", "'5' is not acceptable; expected a whole number, without quotes or exponent"),
        ("train.steps=1e3", "'1e3' is not acceptable; expected a whole number, without quotes or exponent"),
        ("train.steps=", "null is not acceptable; expected a whole number"),
        ("train.steps=many", "'many' is not acceptable; expected a whole number"),
        ("train.steps=[1]", "[1] is not acceptable; expected a whole number"),
        ("train.steps={a: 1}", "a section with a is not acceptable; expected a whole number"),
        ("train.steps=0", "0 is out of range; give at least 1"),
        ("train.steps=-3", "-3 is out of range; give at least 1"),
        ("optim.lr=true", "true is not acceptable; expected a number"),
        ("optim.lr=fast", "'fast' is not acceptable; expected a number"),
        ("optim.lr=0", "0 is out of range; give more than 0"),
        ("optim.lr=.inf", "inf is not acceptable; expected a finite number"),
        ("optim.lr=.nan", "nan is not acceptable; expected a finite number"),
        ("optim.lr=1e999", "is not acceptable; expected a finite number"),
        ("optim.clip_norm=0", "0 is out of range; give more than 0 (global gradient-norm limit; null: no clipping)"),
        ("optim.clip_norm=false", "false is not acceptable; expected a number"),
        ("optim.momentum=1", "1 is out of range; give at least 0 and less than 1 (sgd only)"),
        ("data.scenes.colours=9", "9 is out of range; give at least 2 and at most 8"),
        ("data.prefetch=65", "65 is out of range; give at least 1 and at most 64 (steps requested ahead"),
        ("data.shuffle=1", "1 is not acceptable; expected true or false"),
        ("data.shuffle='yes'", "'yes' is not acceptable; expected true or false"),
        ("data.shuffle=", "null is not acceptable; expected true or false"),
        ("optim.betas=0.9", "0.9 is not acceptable; expected a list"),
        ("optim.betas=[0.9]", "item 2 is missing; add it"),
        ("optim.betas=[0.9, 0.9, 0.9]", "[0.9, 0.9, 0.9] has too many items; give 2"),
        ("optim.betas=[0.9, 1.5]", "[0.9, 1.5] is not acceptable; both betas must be at least 0 and below 1"),
        ("optim.betas=[0.9, true]", "is not acceptable; expected a number"),
        ("optim.name=adamx", "'adamx' is not among adamw, sgd; did you mean adamw?"),
        ("optim.name=3", "3 is not among adamw, sgd"),
        ("train.precision=int4", "'int4' is not among fp32, bf16, fp16, fp64"),
        ("model.freeze=vision", "'vision' is not acceptable; expected a list"),
        ("model.freeze=[visio]", "'visio' is not among vision, projector, language; did you mean vision?"),
        ("model.config=3", "3 is not acceptable; expected a section of keys and values"),
        ("name=123", "123 is not acceptable; expected text; put it in quotes"),
        ("name=a b", "'a b' is not acceptable; use letters, digits, dot, underscore and dash only"),
        ("storage=s3://bucket/runs", "expected a folder that all nodes see"),
        ("name=../up", "'../up' is not acceptable; use letters"),
        ("checkpoint.keep_every=0", "0 is out of range; give at least 1 (keep those of steps"),
        ("checkpoint.path=gs://bucket/x", "expected a folder that all nodes see, or s3://bucket/prefix; endpoint"),
        ("optim=3", "3 is not a section; give keys below it: name, lr, betas"),
        ("optim.schedule=cosine", "'cosine' is not a section; give keys below it: kind, warmup_steps, min_ratio"),
    ],
)
def test_wrong_value_names_flag_key_value_and_remedy(complaint, override, expected):
    message = complaint(MINIMAL, override)
    key = override.partition("=")[0]
    assert message.startswith(f"--set {override}: {key}")
    assert expected in message
    assert "\n" not in message


def test_wrong_value_in_file(complaint):
    text = "model: {preset: a}\ntrain: {steps: true, global_batch: 2.5}\n"
    assert complaint(text).splitlines() == [
        "job.yaml: train.steps: true is not acceptable; expected a whole number",
        "job.yaml: train.global_batch: 2.5 is not acceptable; expected a whole number "
        "(samples per optimizer step, whatever the number of workers)",
    ]


def test_all_problems_are_told_at_once(complaint):
    message = complaint(MINIMAL + "optim: {lr: -1, foo: 2, name: x}\n", "data.loaders=0")
    assert len(message.splitlines()) == 4
    assert [line.split(":")[0] for line in message.splitlines()].count("job.yaml") == 3
    assert "--set data.loaders=0: data.loaders: 0 is out of range; give at least 1" in message


# Combinations


@pytest.mark.parametrize(
    ("overrides", "where", "expected"),
    [
        (
            ["layout.cp=4"],
            "job.yaml with --set layout.cp=4",
            "x layout.cp=4 needs as many workers, but elastic.max_workers=1",
        ),
        (["layout.tp=4"], "job.yaml with --set layout.tp=4", "elastic.max_workers=1; raise max_workers or lower tp"),
        (
            ["elastic.min_workers=4"],
            "job.yaml with --set elastic.min_workers=4",
            "elastic: min_workers=4 exceeds max_workers=1; lower min_workers or raise max_workers",
        ),
        (
            ["optim.schedule.warmup_steps=100"],
            "job.yaml with --set optim.schedule.warmup_steps=100",
            "leaves no step of train.steps=100; shorten the warm-up or train longer",
        ),
        (
            ["train.steps=5", "optim.schedule.warmup_steps=5"],
            "job.yaml with --set train.steps=5 --set optim.schedule.warmup_steps=5",
            "leaves no step",
        ),
        (["optim.momentum=0.5"], "job.yaml with --set optim.momentum=0.5", "remove momentum or set name: sgd"),
        (["data.source=webdataset"], "job.yaml with --set data.source=webdataset", "needs path, a glob"),
        (["data.path=x.tar"], "job.yaml with --set data.path=x.tar", "remove path/val_path or set source: files"),
        (["data.format=mds"], "job.yaml with --set data.format=mds", "remove format or set source: files"),
        (
            ["data.columns={text: x}"],
            "job.yaml with --set data.columns={text: x}",
            "remove columns or set source: files",
        ),
        (["model.path=x"], "job.yaml with --set model.path=x", "give exactly one of preset, config, path"),
        (["model.preset=null"], "job.yaml with --set model.preset=null", "(given: none)"),
        (["model={}"], "--set model={}", "model: give exactly one of preset, config, path (given: none)"),
        (
            ["model.freeze=[vision, projector, language]"],
            "job.yaml with --set model.freeze=[vision, projector, language]",
            "nothing would train; leave at least one out",
        ),
    ],
)
def test_wrong_combination(complaint, overrides, where, expected):
    message = complaint(MINIMAL, *overrides)
    assert message.startswith(where + ": ")
    assert expected in message


def test_wrong_combination_in_file_blames_no_innocent_flag(complaint):
    message = complaint(MINIMAL + "elastic: {min_workers: 4}\n", "seed=3", "optim.lr=0.1")
    assert message.startswith("job.yaml: elastic: min_workers=4 exceeds max_workers=1;")


# Overrides


@pytest.mark.parametrize("text", ["3e-4", "0.0003", "3.0e-4", "3E-4", "+3e-4"])
def test_override_reads_a_learning_rate(job, text):
    assert math.isclose(job(MINIMAL, f"optim.lr={text}").optim.lr, 3e-4)


def test_override_of_lists_sections_and_null(job):
    config = job(
        MINIMAL,
        "optim.betas=[0.8, 0.9]",
        "optim.schedule={kind: linear, warmup_steps: 3}",
        "optim.clip_norm=null",
        "model.freeze=[vision]",
        "data.prompt=Say what it is.",
    )
    assert config.optim.betas == (0.8, 0.9)
    assert config.optim.schedule.kind == "linear"
    assert config.optim.clip_norm is None
    assert config.model.freeze == ("vision",)
    assert config.data.prompt == "Say what it is."


def test_override_creates_sections(job):
    config = job("train: {steps: 2, global_batch: 8}\n", "model.config.text_config.hidden_size=64", " seed = 7")
    assert config.model.config == {"text_config": {"hidden_size": 64}}
    assert config.seed == 7


def test_override_enters_an_empty_section(job):
    assert job(MINIMAL + "optim:\n", "optim.lr=0.5").optim.lr == 0.5


def test_later_override_wins(job, complaint):
    assert job(MINIMAL, "optim.lr=-1", "optim.lr=0.5").optim.lr == 0.5
    assert complaint(MINIMAL, "optim.lr=0.5", "optim.lr=-1").startswith("--set optim.lr=-1: ")


def test_override_keeps_equal_signs_in_the_value(job):
    assert job(MINIMAL, "data.prompt=a=b").data.prompt == "a=b"


@pytest.mark.parametrize("override", ["", "=", "=3", "optim.lr", "optim..lr=1", ".lr=1", "optim.=1", "a. b=1"])
def test_malformed_override(complaint, override):
    expected = f"--set {override}: expected key=value, e.g. --set optim.lr=3e-4"
    assert complaint(MINIMAL, override) == expected


def test_override_with_bad_yaml(complaint):
    message = complaint(MINIMAL, "optim.betas=[0.9")
    assert message.startswith("--set optim.betas=[0.9: the value is not valid YAML, line 1, column 5: ")


@pytest.mark.parametrize("text", ["a: b", "*anchor", "{a: 1, a: 2}", "@at"])
def test_override_value_that_needs_quotes(complaint, text):
    assert f"--set data.prompt={text}: " in complaint(MINIMAL, f"data.prompt={text}")


def test_override_through_a_value(complaint):
    message = complaint(MINIMAL, "train.steps.x=1")
    assert message.startswith("--set train.steps.x=1: train.steps is a value (100), not a section; set train.steps")


def test_override_below_a_key_that_is_no_section(complaint):
    message = complaint(MINIMAL, "optim.lr.x=1")
    assert message == "--set optim.lr.x=1: optim.lr: a section with x is not acceptable; expected a number"


# As a whole


def test_parse_names_its_source():
    with pytest.raises(ConfigError, match=r"^api: train: missing; add it$"):
        parse({"model": {"preset": "a"}}, source="api")


def test_parse_does_not_change_its_input():
    tree = {"model": {"preset": "a"}, "train": {"steps": 1, "global_batch": 1}, "data": None}
    parse(tree)
    assert tree["data"] is None


def test_a_config_survives_its_own_dump(job):
    config = job(MINIMAL, "optim.betas=[0.8, 0.9]", "layout.tp=2", "elastic.max_workers=8")
    assert parse(config.model_dump()) == config
    assert parse(config.model_dump(mode="json")) == config


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)


@given(
    key=st.sampled_from(["train", "train.steps", "optim", "optim.betas", "optim.lr", "model", "data.scenes", "x"]),
    value=VALUES,
)
def test_any_value_gives_a_config_or_a_config_error(key, value):
    tree: dict = {"model": {"preset": "a"}, "train": {"steps": 1, "global_batch": 1}, "optim": {}, "data": {}}
    *parents, leaf = key.split(".")
    section = tree
    for parent in parents:
        section = section[parent]
    section[leaf] = value
    try:
        parse(tree, "job.yaml")
    except ConfigError as error:
        assert all(line.startswith("job.yaml: ") for line in str(error).split("\njob.yaml")[:1])


# Environment variables


def test_variable_is_taken_from_the_environment(job, monkeypatch):
    monkeypatch.setenv("PLANARIA_TEST_RUNS", "/big/disk")
    assert job(MINIMAL + "storage: ${PLANARIA_TEST_RUNS}/runs\n").storage == "/big/disk/runs"


@pytest.mark.parametrize("held", [None, ""])
def test_default_where_a_variable_is_unset_or_empty(job, monkeypatch, held):
    monkeypatch.delenv("PLANARIA_TEST_RUNS", raising=False)
    if held is not None:
        monkeypatch.setenv("PLANARIA_TEST_RUNS", held)
    assert job(MINIMAL + "storage: ${PLANARIA_TEST_RUNS:-../runs}\n").storage == "../runs"


def test_variable_wins_over_its_default(job, monkeypatch):
    monkeypatch.setenv("PLANARIA_TEST_RUNS", "here")
    assert job(MINIMAL + "storage: ${PLANARIA_TEST_RUNS:-there}\n").storage == "here"


def test_variables_below_a_list_and_in_overrides(job, monkeypatch):
    monkeypatch.setenv("PLANARIA_TEST_PART", "vision")
    text = MINIMAL.replace("{preset: llava-tiny}", "{preset: llava-tiny, freeze: ['${PLANARIA_TEST_PART}']}")
    assert job(text).model.freeze == ("vision",)
    assert job(MINIMAL, "storage=${PLANARIA_TEST_PART}/x").storage == "vision/x"


def test_dollar_signs_that_are_no_reference(job, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("PLANARIA_TEST_RUNS", "${HOME}")
    assert job(MINIMAL + "storage: cost$5/$HOME/$${HOME}\n").storage == "cost$5/$HOME/${HOME}"
    assert job(MINIMAL + "storage: ${PLANARIA_TEST_RUNS}\n").storage == "${HOME}"  # not expanded again


def test_unset_variable_names_file_key_and_remedy(complaint, monkeypatch):
    monkeypatch.delenv("PLANARIA_TEST_RUNS", raising=False)
    told = complaint(MINIMAL + "storage: ${PLANARIA_TEST_RUNS}/runs\ndata: {tokenizer: '${oops'}\n")
    assert told.splitlines() == [
        "job.yaml: storage: '${PLANARIA_TEST_RUNS}/runs' is not acceptable; the environment variable "
        "PLANARIA_TEST_RUNS is not set; set it, or give a default: ${PLANARIA_TEST_RUNS:-...}",
        "job.yaml: data.tokenizer: '${oops' is not acceptable; '${' begins no variable; "
        "write ${NAME}, ${NAME:-default}, or $${ for a plain ${",
    ]


def test_empty_variable_is_refused(complaint, monkeypatch):
    monkeypatch.setenv("PLANARIA_TEST_RUNS", "")
    told = complaint(MINIMAL, "data={source: webdataset, path: '${PLANARIA_TEST_RUNS}/train-*.tar'}")
    assert told.startswith("--set data={source: webdataset")
    assert "PLANARIA_TEST_RUNS is empty" in told


def test_where_checkpoints_lie(job):
    assert vault_root(job(MINIMAL + "name: n\n"), "/runs/n") == "/runs/n"
    for path, expected in (
        ("/big/disk/", "/big/disk/n"),
        ("s3://bucket/runs/", "s3://bucket/runs/n"),
        ("s3://bucket", "s3://bucket/n"),
    ):
        there = absolute_paths(job(MINIMAL + f"name: n\ncheckpoint: {{path: '{path}'}}\n"))
        assert vault_root(there, "/runs/n") == expected
    relative = absolute_paths(job(MINIMAL + "name: n\ncheckpoint: {path: there}\n"))
    assert vault_root(relative, "/runs/n") == str(Path("there/n").absolute())


def test_a_password_in_a_url_is_not_repeated(complaint):
    message = complaint(MINIMAL, "checkpoint.path=s3://key:hidden@bucket/x")
    assert "hidden" not in message and "'s3://...@bucket/x' is not acceptable" in message


# The engine


def test_an_engine_is_a_name_or_a_section(job):
    assert job().engine.name == "native"
    assert job(MINIMAL + "engine: deepspeed\n").engine.zero_stage == 2
    config = job(MINIMAL + "engine: {name: deepspeed, zero_stage: 3, offload_optimizer: cpu}\n")
    assert (config.engine.zero_stage, config.engine.offload_optimizer) == (3, "cpu")
    assert job(MINIMAL, "engine=deepspeed") == job(MINIMAL + "engine: deepspeed\n")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["engine=deepsped"], "engine.name: 'deepsped' is not among native, deepspeed; did you mean deepspeed?"),
        (["engine.zero_stage=3"], "zero_stage has no effect with name: native; remove it, or set name: deepspeed"),
        (["engine={name: deepspeed, zero_stage: 4}"], "engine.zero_stage: 4 is not among 0, 1, 2, 3"),
        (["engine={name: deepspeed, zero_stage: 0, offload_optimizer: cpu}"], "needs zero_stage of at least 1"),
        (["engine=deepspeed", "layout.tp=2", "elastic.max_workers=2"], "set layout.tp: 1, or engine.name: native"),
        (["engine=deepspeed", "layout.cp=2", "elastic.max_workers=2"], "set layout.cp: 1, or engine.name: native"),
        (["engine=deepspeed", "layout.pp=2", "elastic.max_workers=2"], "set layout.pp: 1, or engine.name: native"),
        (["engine=deepspeed", "layout.dp_replicate=2"], "set layout.dp_replicate: 1, or engine.name: native"),
        (["engine=deepspeed", "train.precision=fp64"], "train.precision=fp64 with engine.name=deepspeed"),
        (["engine={name: deepspeed, zero_stage: 1}", "train.precision=bf16"], "set engine.zero_stage: 2 or 3"),
        (["engine=deepspeed", "train.recompute=unit"], "leave both out, or set engine.name: native"),
    ],
)
def test_what_deepspeed_does_not_run_is_refused_by_name(complaint, given, told):
    assert told in complaint(MINIMAL, *given)
