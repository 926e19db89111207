"""Names and files of other trainers: each leads to the setting here, or to the page's table."""

import json
import re
from pathlib import Path

import pytest
from commands import SMALL

from jaxpipe import train
from jaxpipe.config import Config, ConfigError, load
from jaxpipe.config.foreign import ROWS, SECTIONS, meaning, table
from jaxpipe.core.schedule import ScheduleError
from jaxpipe.model import FAMILIES
from jaxpipe.planning.rules.across import check_settings
from jaxpipe.schedules import find_family

PAGE = Path(__file__).parents[2] / "jaxpipe" / "config" / "README.md"
# A configuration as torchtitan's llama3_8b.toml has it.
TITAN = """
[job]
dump_folder = "./outputs"
description = "Llama 3 8B training"
[profiling]
enable_profiling = true
[metrics]
log_freq = 10
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 3e-4
[lr_scheduler]
warmup_steps = 200
[training]
local_batch_size = 1
seq_len = 8192
max_norm = 1.0
steps = 1000
[parallelism]
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
[activation_checkpoint]
mode = "selective"
"""


def refusal(*words, config=SMALL):
    with pytest.raises(ConfigError) as caught:
        check_settings(load(config, words))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_page_has_the_table_that_errors_read():
    assert table() in PAGE.read_text()


def test_the_table_leads_to_settings_that_exist_and_shadows_none():
    own = {key for record in Config.__annotations__ for key in keys_of(record)}
    for names, here in ROWS:
        settings = re.findall(r"\b([a-z]+)\.(\w+)", here)
        assert settings, here
        for section, key in settings:
            assert key in keys_of(section), f"{section}.{key}"
        for name in names.split():
            assert "/" in name or name not in own, f"{name} is a setting here"
    names = [name for row in ROWS for name in row[0].split()]
    assert len(names) == len(set(names))
    assert not SECTIONS.keys() & Config.__annotations__.keys()
    assert set(SECTIONS.values()) <= Config.__annotations__.keys()


def keys_of(section):
    if section == "model":
        return {key for f in FAMILIES.values() for key in f.config.__struct_fields__}
    record = Config.__annotations__[section]
    return set(record.__struct_fields__)


@pytest.mark.parametrize(
    ("override", "setting"),
    [
        ("train.global_batch_size=8", "train.batch_tokens"),
        ("train.micro_batch_size=8", "train.microbatch_size"),
        ("model.hidden_size=8", "model.d_model"),
        ("model.num_hidden_layers=8", "model.n_layers"),
        ("model.name=llama3", "model.preset"),
        ("model.rms_norm_eps=1e-5", "model.norm_eps"),
        ("optimizer.learning_rate=1e-3", "optimizer.lr"),
        ("parallel.tensor_model_parallel_size=2", "parallel.tp"),
        ("parallelism.pipeline_parallel_degree=2", "parallel.pp"),
        ("training.max_norm=2", "optimizer.clip_norm"),
        ("parallel.num_microbatches=8", "train.grad_accum_steps"),
        ("parallel.split_points=2", "parallel.layer_split"),
        ("train.num_train_epochs=3", "train.steps"),
        ("model.num_heads=8", "model.n_heads"),
        ("optimizer.betas=[0.9, 0.95]", "optimizer.beta1"),
        ("data.tokenizer=gpt2", "data.path"),
        ("lora.r=8", "lora.rank"),
        ("run.name=first", "run.dir"),
    ],
)
def test_a_foreign_key_names_the_setting(override, setting):
    assert f"is {setting}" in re.sub("other trainers' ", "", refusal(override)).replace(" here", "")


def test_all_unknown_keys_are_named_at_once():
    said = refusal(
        "model.hidden_size=8", "train.num_microbatches=2", "train.setps=3", "log.color=1"
    )
    assert said.startswith("unknown keys model.hidden_size: other trainers' hidden_size is model.")
    for part in ("; train.num_microbatches: other", "; train.setps: did you mean train.steps?; "):
        assert part in said
    assert "; log.color; `python -m" in said


# Words that share letters with a setting of another meaning.
@pytest.mark.parametrize("key", ["parallel.disable_loss_parallel", "train.compile"])
def test_a_key_without_a_counterpart_has_no_hint(key):
    assert f"unknown key {key}; `python" in refusal(f"{key}=1")


def test_an_option_of_another_trainer_names_the_setting(capsys):
    assert train.main([str(SMALL), "--tensor-model-parallel-size", "2"]) == 2
    assert "is the setting parallel.tp, given as section.key=value" in capsys.readouterr().err


# The names of torch.distributed.pipelining.schedules, without and with `Schedule` in front.
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("GPipe", "gpipe"), ("1F1B", "1f1b"), ("Interleaved1F1B", "interleaved_1f1b"),
     ("LoopedBFS", "bfs"), ("InterleavedZeroBubble", "interleaved_zb"),
     ("ZBVZeroBubble", "zbv"), ("DualPipeV", "dualpipev"), ("ZB-H1", "zb_h1"), ("ZB-V", "zbv")],
)  # fmt: skip
def test_schedules_by_pytorchs_names_are_found_or_hinted_at(theirs, ours):
    for name in (theirs, f"Schedule{theirs}"):
        if name.lower() == ours:
            assert find_family(name).name == ours
            continue
        with pytest.raises(ScheduleError, match=re.escape(f"did you mean {ours}?")):
            find_family(name)
        assert f"did you mean {ours}?" in refusal(f"parallel.schedule={name}")


def test_a_file_of_torchtitan_is_translated_at_once(tmp_path):
    path = tmp_path / "titan.toml"
    path.write_text(TITAN)
    said = refusal(config=path)
    assert '"Coming from another trainer" in jaxpipe/config/README.md' in said
    for line in (
        "[job], [profiling], [metrics], [lr_scheduler], [training]", "job.dump_folder is run.dir",
        "training.steps is train.steps", "training.local_batch_size is train.microbatch_size x",
        "lr_scheduler.warmup_steps is optimizer.warmup_steps", "metrics.log_freq is log.every",
        "parallelism.pipeline_parallel_degree is parallel.pp",
        "activation_checkpoint.mode is train.remat",
    ):  # fmt: skip
        assert line in said
    assert "model.name: did you mean" not in said


def test_a_config_json_or_yaml_in_place_of_the_toml_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8}))
    (tmp_path / "base.yml").write_text("steps: 3\nmodel: llama\n")
    for path in (tmp_path, tmp_path / "config.json"):
        assert f"checkpoint import {tmp_path} --write-config CONFIG" in refusal(config=path)
    assert "write a TOML file" in refusal(config=tmp_path / "base.yml")


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("parallel.sequence_parallel=True", "write true"),
        ("parallel.sequence_parallel=1", "write true"),
        ("parallel.sequence_parallel=no", "write false"),
        ("train.steps=1e3", "write 1000"),
        ("train.steps=None", "leave the setting out, which takes its default"),
        ("model.preset=meta-llama/Llama-3.1-8B", "did you mean llama3_1_8b"),
        ("model.family=llama3", "did you mean llama? "),
        ('train.steps="10"', "write 10."),
        ("optimizer.lr=.001", "write 0.001."),
        ("train.compute_dtype=bf16", "did you mean 'bfloat16'? "),
        ("train.compute_dtype=torch.float16", "did you mean 'float16'? "),
        ("optimizer.decay=Cosine", "did you mean 'cosine'? "),
        ("train.remat=false", "did you mean 'none'? "),
        (
            "lora.targets=wq,wk",
            """write ["wq", "wk"], in a shell as lora.targets='["wq", "wk"]'.""",
        ),
        ("debug.ticks=1", "write [1], in a shell as"),
        ('data.sources=[{path="a", wieght=1}]', "data.sources[0].wieght: did you mean weight? Its"),
        ("data.sources=[{weight=1}]", "data.sources[0].path is missing"),
        ("data.sources={}", "expected a list, got {}"),
        ("data.sources=[1]", "data.sources[0]: expected a table `{...}`, got 1"),
    ],
)
def test_values_in_other_notations_name_the_right_one(override, remedy):
    assert remedy in refusal(override)


def test_a_value_that_no_quotes_make_right_is_not_to_be_quoted():
    assert refusal("checkpoint.resume=false").endswith("expected `str`, got False.")


def test_a_file_without_a_model_is_told_of_presets(tmp_path):
    (tmp_path / "own.toml").write_text("[train]\nsteps = 3\n")
    assert "give it a value, or [model] a preset" in refusal(config=tmp_path / "own.toml")


def test_what_has_no_meaning_here_has_none():
    assert meaning("job", "description") is None
