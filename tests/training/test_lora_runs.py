"""Adapters in a run: the base stays, PEFT reads and writes them, exports and scores are merged."""

import json
import re
import resource
from math import prod

import jax
import numpy as np
import pytest
from hf_models import all_tensors, export, stored_params
from safetensors.numpy import load_file, save_file

from jaxpipe import config as configs
from jaxpipe.checkpoint.__main__ import main as checkpoint_command
from jaxpipe.checkpoint.hf.adapters import export_adapters
from jaxpipe.config import ConfigError
from jaxpipe.planning.cost.costs import costs_of
from jaxpipe.planning.cost.memory import rank_bytes
from jaxpipe.planning.rules.across import check_settings
from jaxpipe.score import main as score_command
from jaxpipe.train import main as train_command
from jaxpipe.train import train
from jaxpipe.training.trainer import Trainer
from jaxpipe.training.weights import stream_weights

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from commands import SMALL  # noqa: E402
from saved_runs import saved_run  # noqa: E402
from trained_models import logits_of, published  # noqa: E402

LORA = ("lora.rank=3", "lora.alpha=6.0")
MESH = ("parallel.pp=2", "parallel.tp=2", "parallel.dp=2", "parallel.zero_stage=2")
RUN = ("train.eval_every=0", "data.source=dummy", "checkpoint.every=2", "optimizer.lr=0.02")


def run(toml, directory, *overrides):
    config = configs.load(toml, [*LORA, *RUN, f"run.dir={directory}", *overrides])
    assert train(config) == 0
    return directory / "checkpoints" / str(config.train.steps)


def leaves(step):
    """Return the parameters of the layers of a checkpoint, and of their adapters, by name."""
    found = {}
    for index, layer in stored_params(step)["layers"].items():
        for name, leaf in flat(layer):
            found[f"{index}/{name}"] = leaf
    adapters = {name: leaf for name, leaf in found.items() if "/lora/" in name}
    return {name: leaf for name, leaf in found.items() if name not in adapters}, adapters


def flat(tree, prefix=""):
    for name, node in tree.items():
        if isinstance(node, dict):
            yield from flat(node, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", node


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, which peft calls
def test_a_published_model_is_tuned_and_handed_over(tmp_path, capsys):
    peft = pytest.importorskip("peft")
    theirs, directory = published("llama")
    toml = tmp_path / "run.toml"
    words = ["import", str(directory), "--write-config", str(toml), "--out", str(tmp_path / "base")]
    assert checkpoint_command(words) == 0
    toml.write_text(SMALL.read_text().partition("[parallel]")[2].join(
        [toml.read_text().partition("[train]")[0] + "[parallel]", ""]
    ))  # fmt: skip
    base = tmp_path / "base" / "0"
    start = (f"checkpoint.resume={base}", "checkpoint.parameters_only=true", *MESH)
    targets = 'lora.targets=["wq", "wv", "wo", "w_gate", "w_down"]'
    step = run(toml, tmp_path / "run", *start, targets, "train.steps=2")
    frozen, adapters = leaves(step)
    before, _ = leaves(base)
    assert all((frozen[name] == before[name]).all() for name in before)
    assert len(adapters) == 3 * 5 * 2
    assert all(np.abs(leaf).max() > 1e-3 for leaf in adapters.values())

    # PEFT's own model, the merged export and the scores of the run are one model.
    assert checkpoint_command(["export", str(step), str(tmp_path / "peft"), "--adapters"]) == 0
    assert checkpoint_command(["export", str(step), str(tmp_path / "merged")]) == 0
    tokens = np.random.default_rng(0).integers(0, 96, (2, 17))
    adapted = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(directory), tmp_path / "peft"
    ).eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    expected = logits_of(adapted, tokens)
    np.testing.assert_allclose(logits_of(merged, tokens), expected, rtol=1e-5, atol=1e-5)
    assert np.abs(expected - logits_of(theirs, tokens)).max() > 0.1
    np.save(tmp_path / "tokens.npy", tokens)
    out = tmp_path / "scores.npz"
    words = [str(tmp_path / "run"), str(tmp_path / "tokens.npy"), "--out", str(out)]
    assert score_command([*words, "parallel.pp=3"]) == 0
    every = torch.log_softmax(torch.from_numpy(expected).double(), -1).numpy()[:, :-1]
    scores = np.take_along_axis(every, tokens[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(np.load(out)["logprobs"], scores, rtol=0, atol=1e-5)

    # The adapters that PEFT wrote start a run on another mesh, and a run resumes on another.
    adapted.save_pretrained(tmp_path / "again")
    given = (f"lora.adapter={tmp_path / 'again'}", targets, "debug.skip_update=true")
    other = (*start[:2], "parallel.dp=8", "parallel.pp=1", "train.steps=1")
    _, came = leaves(run(toml, tmp_path / "other", *other, *given))
    for name, leaf in adapters.items():
        np.testing.assert_array_equal(came[name], leaf)
    capsys.readouterr()
    _, later = leaves(
        run(toml, tmp_path / "run", targets, "parallel.pp=1", "parallel.dp=8", "train.steps=4")
    )
    assert "resumed from step 2" in capsys.readouterr().out
    assert any((later[name] != leaf).any() for name, leaf in adapters.items())


@pytest.mark.extended
def test_adapters_learn_beside_a_base_in_8_bits():
    """The base stays as it is, and its scales follow what it multiplies."""
    overrides = (
        *RUN, "lora.rank=8", "parallel.pp=2", "parallel.dp=1", "parallel.schedule=zb_h1",
        "optimizer.decay=constant", "model.n_layers=2", "model.d_model=64",
        "train.microbatch_size=2", "train.compute_dtype=bfloat16", "train.fp8=delayed",
        "train.fp8_history=4",
    )  # fmt: skip
    trainer = Trainer.resolve(configs.load(SMALL, overrides), jax.devices()[:2])
    text = b"def loss(logits, targets):\n    return -logits[targets].mean()\n" * 5
    rows = np.frombuffer(text[: 4 * 2 * 33], np.uint8).astype(np.int32).reshape(4, 2, 33)
    batch = trainer.put({"inputs": rows[..., :-1], "targets": rows[..., 1:]})
    begin, state, losses = trainer.init(), trainer.init(), []
    for _ in range(30):
        state, metrics = trainer.train_step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.5
    assert (state.variables["fp8_history"] > 0).all()
    for before, after in zip(begin.params["layers"], state.params["layers"], strict=True):
        moved = jax.tree.map(lambda a, b: bool((a != b).any()), before, after)
        assert all(jax.tree.leaves(moved.pop("lora")))
        assert not any(jax.tree.leaves(moved))


@pytest.mark.slow
def test_adapters_of_experts_are_merged_and_written_one_by_one(tmp_path):
    trainer, state, _ = saved_run(
        tmp_path / "run", *LORA, "model.n_experts=4", "model.experts_per_token=2",
        "model.d_expert=16", "model.qk_norm=true", "optimizer.lr=0.1", "parallel.pp=2",
        "parallel.dp=2", "parallel.ep=2", "parallel.tp=2", steps=3,
    )  # fmt: skip
    step = tmp_path / "run" / "checkpoints" / "3"
    merged = all_tensors(export(step, trainer.config.model, tmp_path / "merged"))
    for name, array in stream_weights(trainer, state):
        np.testing.assert_allclose(array, merged[name], rtol=1e-6, atol=1e-9, err_msg=name)

    assert checkpoint_command(["export", str(step), str(tmp_path / "peft"), "--adapters"]) == 0
    tensors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    layer = stored_params(step)["layers"]["1"]
    name = "model.layers.1.mlp.experts.3.up_proj"
    a, b = (tensors[f"base_model.model.{name}.lora_{matrix}.weight"] for matrix in "AB")
    assert (a.shape, b.shape) == ((3, 32), (16, 3))
    weight = layer["moe"]["experts"]["w_up"][3].T + 2.0 * b @ a
    np.testing.assert_allclose(merged[f"{name}.weight"], weight, rtol=1e-5, atol=1e-7)
    settings = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert "experts.3.up_proj" not in settings["target_modules"]
    assert {"3.up_proj", "self_attn.q_proj"} <= {*settings["target_modules"]}


def test_adapters_appear_only_when_they_are_complete(tmp_path):
    config, limits = configs.load(SMALL, LORA), resource.getrlimit(resource.RLIMIT_FSIZE)
    (folder := tmp_path / "peft").mkdir()  # an empty one may be there

    def export_queries():
        read = lambda paths: [np.ones((32, 3)), np.ones((3, 32))]  # noqa: E731
        has = lambda path: path[-2:] == ("wq", "a")  # noqa: E731
        return export_adapters(read, has, config.model, config.lora, folder)

    resource.setrlimit(resource.RLIMIT_FSIZE, (2**10, limits[1]))  # as on a full disk
    try:
        with pytest.raises(ConfigError, match="peft cannot be written"):
            export_queries()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [*tmp_path.rglob("*")] == [folder]
    assert export_queries() == 4
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".safetensors"]


def test_adapters_of_experts_in_one_tensor_are_not_exported(tmp_path):
    config = configs.load(
        SMALL, ["model.preset=gpt_oss_20b", "lora.rank=3", 'lora.targets=["expert_down"]']
    )
    has = lambda path: path[-2:] == ("w_down", "a")  # noqa: E731
    with pytest.raises(ConfigError, match="holds all experts of a layer, and PEFT reads no adapt"):
        export_adapters(lambda paths: [], has, config.model, config.lora, tmp_path / "peft")
    assert not (tmp_path / "peft").exists()


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_the_plan_counts_no_gradient_of_frozen_parameters(zero_stage):
    overrides = [*LORA, f"parallel.zero_stage={zero_stage}", "train.compute_dtype=bfloat16"]
    trainer = Trainer.resolve(configs.load(SMALL, overrides))
    shapes, shardings = trainer.state_shapes, trainer.state_shardings

    def count(shapes, shardings):
        leaves = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
        return sum(prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in leaves)

    planned = rank_bytes(trainer.config, trainer.layout, trainer.plan.buffers)
    assert planned.parameters == count(shapes.params, shardings.params)
    assert 0 <= count(shapes.optimizer, shardings.optimizer) - planned.optimizer <= 16  # counters
    own, plain = (costs_of(configs.load(SMALL, part)).kinds["layer"] for part in (overrides, []))
    assert own.W == own.F - plain.F < plain.W / 4


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("lora.dropout=0.1",), "lora.dropout=0.1 is read only with lora.rank"),
        ((*LORA, 'lora.targets=["wz"]'), "lora.targets has 'wz', or is left out for all"),
        ((*LORA, "parallel.tp=4"), "parallel.tp=4 must divide model.n_kv_heads"),
    ],
)
def test_refusals(overrides, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_settings(configs.load(SMALL, list(overrides)))


def write_adapters(folder, width=32, layers=(0, 1, 2, 3), content=b"", **settings):
    """Write adapters of the queries, of rank 3, as PEFT does, or a file with that content."""
    (folder / "adapter_config.json").write_text(json.dumps({"r": 3, "lora_alpha": 6.0} | settings))
    shapes = {"lora_A": (3, width), "lora_B": (width, 3)}
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.{name}.weight": np.ones(
            shape, np.float32
        )
        for layer in layers
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    if content:
        (folder / "adapter_model.safetensors").write_bytes(content)


@pytest.mark.extended
def test_adapters_need_a_trained_model(tmp_path, capsys):
    """Unless the run says that it starts from initial parameters; a restart must have them, too."""
    words = [str(SMALL), *RUN, "train.steps=2", f"run.dir={tmp_path}"]
    assert train_command([*words, *LORA]) == 2
    assert "give the model's as checkpoint.resume" in capsys.readouterr().err
    assert train_command([*words, *LORA, "checkpoint.resume=none"]) == 0
    assert train_command(words) == 2
    assert "set lora.rank=3, or use another run.dir" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ({"r": 8}, "has r=8, but lora.rank=3: set lora.rank=8"),
        ({"use_dora": True}, "adapter_config.json has use_dora=True, which is no plain adapter"),
        ({"layers": (0, 1, 3)}, "has no base_model.model.model.layers.2.self_attn.q_proj.lora_A"),
        ({"layers": range(5)}, "also has base_model.model.model.layers.4.self_attn.q_proj.lora_A"),
        ({"width": 48}, r"is of another model: lora/attn/wq/a has shape \(48, 3\) there"),
        (
            {"content": b"version https://git-lfs"},
            r"holds no adapters in PEFT's format \(Error whi",
        ),
    ],
)
def test_adapters_of_another_model_are_refused(tmp_path, capsys, written, sentence):
    write_adapters(tmp_path, **written)
    overrides = [*LORA, 'lora.targets=["wq"]', f"lora.adapter={tmp_path}", "train.eval_every=0"]
    overrides += ["checkpoint.resume=none"]
    assert train_command([str(SMALL), *overrides, f"run.dir={tmp_path / 'run'}"]) == 2
    error = capsys.readouterr().err
    assert re.search(sentence, error), error
    assert error.count("\n") == 1
