"""A checkpoint resumes as the model that it was trained as, unless a change is allowed."""

import json
import shlex
import shutil
import typing
from pathlib import Path

import jax
import msgspec
import pytest
from commands import SMALL
from flax.traverse_util import unflatten_dict
from hf_models import LLAMA, QWEN3_MOE, random_tensors, write_model

from jaxpipe import config as configs
from jaxpipe import train
from jaxpipe.checkpoint.__main__ import main as command
from jaxpipe.checkpoint.compatibility import (
    MAY_DIFFER,
    SHOWN_BY_ARRAYS,
    changed_settings,
    check_same_arrays,
    check_same_settings,
)
from jaxpipe.config import Config, ConfigError, TrainConfig
from jaxpipe.model import FAMILIES


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    assert train.main([str(SMALL), f"run.dir={directory}", "train.steps=3"]) == 0
    return directory


@pytest.fixture
def starts(tmp_path, run):
    """Three ways to use a run's checkpoint: in the run itself, by its path, its parameters."""
    same = tmp_path / "same"
    shutil.copytree(run, same)
    other = [str(SMALL), f"run.dir={tmp_path / 'other'}", f"checkpoint.resume={run}"]
    return [
        [str(SMALL), f"run.dir={same}", "train.steps=4"],
        [*other, "train.steps=4"],
        [*other, "checkpoint.parameters_only=true", "train.steps=3"],
    ]


CHANGED = ["model.rope_theta=10000.0", "model.norm_eps=0.001", "model.rope_factor=2.0",
           "model.sliding_window=7"]  # fmt: skip


@pytest.mark.parametrize("change", CHANGED)
def test_another_model_of_the_same_shapes_is_refused(starts, change, capsys):
    key, _, value = change.partition("=")
    for words in starts:
        assert train.main([*words, change]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        before, now = error.split(" but this configuration has ")
        assert f"was trained with {key}=" in before
        assert now.startswith(f"{key}={value}: set {key}=")
        assert f"'checkpoint.allow_changed=[\"{key}\"]'" in now


@pytest.mark.parametrize(
    ("there", "here", "names"),
    [
        (["model.d_model=32"], ["model.d_model=64"], ["model.d_model=32"]),
        (
            ["model.d_model=32", "model.n_heads=4"], ["model.d_model=64", "model.n_heads=2"],
            ["model.d_model=32", "model.n_heads=4"],
        ),
        (["model.n_heads=4"], ["model.n_heads=2", "model.n_kv_heads=2"], ["model.n_heads=4"]),
        (["model.family=gemma3", "model.head_dim=8"],
         ["model.family=gemma3", "model.head_dim=16"],
         ["model.head_dim=8"]),
    ],
)  # fmt: skip
def test_the_given_setting_is_named_and_not_what_derives_from_it(there, here, names):
    """A width of heads or of queries that is not given derives from another size."""
    before, now = configs.load(SMALL, there), configs.load(SMALL, [*here, "run.dir=a"])
    meta = {"config": configs.to_toml(before)}
    with pytest.raises(ConfigError) as caught:
        check_same_settings(Path("a/1"), meta, now, with_moments=True)
    first, remedy = str(caught.value).split(": ")
    named = first.split("was trained with ")[1].split(" but ")[0]
    assert set(names) <= set(named.split(", "))
    assert not {"head_dim", "query_width"} & {
        word.split("=")[0].removeprefix("model.")
        for word in named.split(", ") if word not in names
    }  # fmt: skip
    assert remedy.startswith(f"set {named.replace(', ', ' ')}, or use another run.dir")
    assert ("allow_changed" in remedy) == ("model.d_model=64" not in here)


def test_a_size_that_arrays_show_is_named(starts, capsys):
    for words in starts:
        assert train.main([*words, "model.d_ff=96"]) == 2
        remedy = "in this configuration; set model.d_ff=64, or use another run.dir."
        assert remedy in capsys.readouterr().err


EXPERTS = ["model.n_experts=4", "model.experts_per_token=2"]


@pytest.mark.parametrize(
    ("there", "here", "array", "remedy"),
    [
        ([*EXPERTS, "model.d_ff=64"], [*EXPERTS, "model.d_ff=96"], "moe/w_up", "set model.d_ff=64"),
        (["lora.rank=2"], ["lora.rank=3"], "lora/wq/a", "set lora.rank=2"),
        ([], ["lora.rank=3", "model.n_layers=5"], "attn/wq", "set model.n_layers=4"),
    ],
)  # fmt: skip
def test_the_remedy_for_an_array_names_what_was_given(there, here, array, remedy):
    """The width of an expert, which the array shows, derives from that of an MLP."""
    meta = {"config": configs.to_toml(configs.load(SMALL, there))}
    config = configs.load(SMALL, here)
    sizes = check_same_settings(Path("a/1"), meta, config, with_moments=False)
    want, have = (
        {"params": unflatten_dict({tuple(array.split("/")): jax.ShapeDtypeStruct((n,), "float32")})}
        for n in (1, 2)
    )
    with pytest.raises(ConfigError, match=f"configuration; {remedy}, or use another run.dir"):
        check_same_arrays(want, have, Path("a/1"), sizes=sizes)


def test_heads_of_the_same_product_are_another_model(starts, capsys):
    config = configs.load(SMALL)
    heads, width = config.model.n_heads, config.model.head_size
    keys = config.model.n_kv_heads
    change = [f"model.n_heads={heads // 2}", f"model.n_kv_heads={keys // 2}",
              f"model.head_dim={width * 2}"]  # fmt: skip
    assert train.main([*starts[0], *change]) == 2
    assert f"was trained with model.n_heads={heads}, model.head_dim={width}" in (
        capsys.readouterr().err.replace(f" model.n_kv_heads={keys},", "")
    )


@pytest.mark.slow
def test_a_change_that_is_allowed_is_taken(starts, capsys):
    """And stored, so that the next start needs permission for the old value, not for the new."""
    words, rope = starts[0], "model.rope_factor=2.0"
    allow = 'checkpoint.allow_changed=["model.rope_factor"]'
    assert train.main([*words, rope, allow]) == 0
    assert train.main([*words, rope, "train.steps=5"]) == 0
    assert train.main([*words, "train.steps=6"]) == 2
    assert train.main([*words, rope, 'checkpoint.allow_changed=["model.rope"]']) == 2
    assert "has 'model.rope', but what it may name are the fields" in capsys.readouterr().err


@pytest.mark.extended
def test_what_may_differ_may(starts):
    same = ["model.head_dim=8", "model.attention_dropout=0.1", "model.dropout=0.1"]
    assert configs.load(SMALL).model.head_size == 8
    assert train.main([*starts[0], *same, "model.max_seq_len=4096"]) == 0


@pytest.mark.slow(only=["muon"])
@pytest.mark.parametrize("name", ["lion", "muon"])
def test_another_optimizer_is_named(starts, name, capsys):
    for words in starts[:2]:
        assert train.main([*words, f"optimizer.name={name}"]) == 2
        error = capsys.readouterr().err
        assert "was trained with optimizer.name='adamw' but" in error
        assert (
            f"optimizer.name='{name}', which has other moments: set optimizer.name=adamw" in error
        )
        assert error.count("\n") == 1
    assert train.main([*starts[2], f"optimizer.name={name}"]) == 0


def test_the_average_of_schedule_free_is_not_lost():
    """Its parameters alone are not those that it evaluates, and beta1 is their weight."""
    config = configs.load(SMALL, ["optimizer.name=schedule_free"])
    other = configs.load(SMALL, ["optimizer.name=schedule_free", "optimizer.beta1=0.5"])
    meta = {"config": configs.to_toml(config)}
    check_same_settings(Path("c"), meta, config, with_moments=True)
    check_same_settings(Path("c"), meta | {"kind": "params"}, other, with_moments=False)
    with pytest.raises(ConfigError, match=r"optimizer.beta1=0.9 but this configuration has 0.5"):
        check_same_settings(Path("c"), meta, other, with_moments=True)
    own = configs.to_toml(configs.load(SMALL, ["optimizer.name=module:function"]))
    for saved in (meta, {"config": own, "has_average": True}):
        with pytest.raises(ConfigError, match="not the average that it evaluates and exports"):
            check_same_settings(Path("c"), saved, config, with_moments=False)
    check_same_settings(
        Path("c"), {"config": own, "has_average": False}, config, with_moments=False
    )


def test_adapters_are_scaled_as_they_were_trained():
    config, other = (
        configs.load(SMALL, ["lora.rank=2", f"lora.alpha={alpha}"]) for alpha in (32.0, 16.0)
    )
    meta = {"config": configs.to_toml(config)}
    check_same_settings(Path("c"), meta, config, with_moments=True)
    check_same_settings(Path("c"), meta, configs.load(SMALL), with_moments=True)
    with pytest.raises(ConfigError, match=r"lora.alpha=32.0 but .* has 16.0.*set lora.alpha=32.0"):
        check_same_settings(Path("c"), meta, other, with_moments=True)


def test_a_length_that_chooses_factors_is_compared():
    factors = {"rope_short_factors": (1.0,) * 4, "rope_long_factors": (2.0,) * 4}
    sizes = {"n_layers": 2, "d_model": 16, "vocab_size": 64, "n_heads": 2, "d_ff": 48,
             "n_kv_heads": 2}  # fmt: skip
    scaling = {"rope_scaling": "longrope", "rope_original_positions": 32}
    model = FAMILIES["llama"].config(**sizes, **scaling, **factors, max_seq_len=64)
    saved = msgspec.to_builtins(model)
    assert changed_settings(saved | {"max_seq_len": 48}, model) == {}
    assert changed_settings(saved | {"max_seq_len": 16}, model) == {"model.max_seq_len": (16, 64)}


OTHER = {int: lambda value: value + 1, float: lambda value: value / 2 or 0.25,
         bool: lambda value: not value, str: lambda value: value + "x",
         tuple: lambda value: (*value, 0.25)}  # fmt: skip


def other_value(hint, value):
    """Return another value of the field's type."""
    hint = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint
    if typing.get_origin(hint) is typing.Literal:
        return next(choice for choice in typing.get_args(hint) if choice != value)
    return OTHER[type(value)](value)


@pytest.mark.parametrize(("family", "model"), [("llama", QWEN3_MOE), ("gpt2", None)])
def test_every_field_is_compared_but_those_of_the_table(family, model):
    """A new field of a family is compared until it is put into the table."""
    record = FAMILIES[family].config
    sizes = {"n_layers": 2, "d_model": 32, "vocab_size": 64, "n_heads": 2, "d_ff": 48}
    model = (model or record(**sizes)).resolved()
    hints = typing.get_type_hints(record, include_extras=True)
    saved = msgspec.to_builtins(model)
    assert changed_settings(saved, model) == {}
    for name in record.__struct_fields__:
        new = other_value(hints[name], saved[name])
        changed = changed_settings(saved | {name: new}, model)
        free = name in MAY_DIFFER or name in SHOWN_BY_ARRAYS
        if name == "router_bias_rate":
            assert f"model.{name}" in changed  # there was a bias, which this model does not have
            assert changed_settings(saved, msgspec.structs.replace(model, **{name: new})) == {}
        elif name == "head_dim" or not free:
            assert changed[f"model.{name}"] == (new, saved[name])
        else:
            assert changed == {}
    assert changed_settings(saved | {"later": 1}, model) == {
        "model.later": (1, "unknown to this version")
    }


@pytest.mark.slow
def test_the_printed_command_trains_the_imported_model(tmp_path, capsys):
    """Settings given to `import` besides the file are needed to start, and to export, too."""
    model = msgspec.structs.replace(LLAMA, rope_factor=8.0, rope_original_positions=64)
    source = write_model(tmp_path / "hf", model, random_tensors(model))
    path = tmp_path / "run.toml"
    small = TrainConfig(steps=1, grad_accum_steps=1, microbatch_size=1, seq_len=16)
    path.write_text(configs.to_toml(Config(model=LLAMA, train=small)))
    more = ["model.rope_factor=8.0", "model.rope_original_positions=64", "data.source=dummy",
            f"run.dir={tmp_path / 'a run'}", "runtime.cpu_devices=8", "parallel.dp=8"]  # fmt: skip
    assert command(["import", str(source), str(path), *more]) == 0
    *_, printed = capsys.readouterr().out.splitlines()
    words = shlex.split(printed)
    assert words[:3] == ["python", "-m", "jaxpipe.train"]
    assert configs.load(words[3], words[4:]).model == configs.load(path, more).model
    assert train.main(words[3:]) == 0
    capsys.readouterr()
    step = tmp_path / "a run" / "checkpoints" / "1"
    assert command(["export", str(step), str(tmp_path / "out"), "--config", str(path)]) == 2
    assert "model.rope_factor=8.0" in capsys.readouterr().err
    without = [word for word in words[3:] if not word.startswith("model.rope_factor")]
    assert train.main([*without, f"run.dir={tmp_path / 'b'}"]) == 2
    assert "model.rope_factor=8.0" in capsys.readouterr().err
    assert json.loads((step / "meta" / "metadata").read_text())["step"] == 1


def test_a_configuration_that_is_not_read_is_one_sentence():
    config = configs.load(SMALL)
    for saved in ("[model]\nn_layers = -1", "n_layers", "[train]\nsteps = 1"):
        with pytest.raises(ConfigError, match="configuration that this version does not read"):
            check_same_settings(Path("a/1"), {"config": saved}, config, with_moments=True)
    check_same_settings(Path("a/1"), {}, config, with_moments=True)
