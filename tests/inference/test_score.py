"""Scores of tokens: those of transformers on every mesh, and the held-out loss of a run."""

import json
import re
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from commands import SMALL  # noqa: E402
from saved_runs import saved_run  # noqa: E402
from several import ends, start_all  # noqa: E402
from trained_models import VOCABULARY, logits_of, published  # noqa: E402

from jaxpipe.checkpoint.__main__ import main as checkpoint_command  # noqa: E402
from jaxpipe.config import ConfigError  # noqa: E402
from jaxpipe.inference.token_sequences import read_sequences  # noqa: E402
from jaxpipe.planning.rules import devices as device_checks  # noqa: E402
from jaxpipe.score import main  # noqa: E402

CASES = {  # a model, and the mesh that scores it
    "llama": ("llama", "parallel.pp=2 parallel.cp=2 parallel.dp=2 parallel.slices=2"),
    "ring": ("llama31", "parallel.cp=4 parallel.dp=4 parallel.cp_method=ring parallel.cp_heads=2"),
    "tied": ("qwen3_tied", "parallel.pp=2 parallel.tp=2 parallel.vocab_parallel_pp=true"),
    "mistral": (
        "mistral",
        "parallel.tp=2 parallel.sequence_parallel=true parallel.dp=2 parallel.zero_stage=3",
    ),
    "chunks": ("llama_one_kv_head", "train.loss_chunks=2 parallel.pp=2 parallel.schedule=dualpipe"),
    "gpt2": ("gpt2", "parallel.pp=3"),
    "latent": ("v3", "parallel.pp=2 parallel.tp=2 parallel.dp=2"),
    "experts": ("qwen3_moe", "parallel.pp=2 parallel.dp=2 parallel.ep=2 parallel.cp=2"),
}

DEEPSEEK = SMALL.parents[2] / "configs" / "quickstart_deepseek.toml"
RUNS = {
    # Averaged parameters, and the biases of a router, which are no parameters.
    "averaged": (SMALL, (
        "optimizer.name=schedule_free", "optimizer.decay=constant", "model.n_experts=4",
        "model.experts_per_token=2", "model.d_expert=16", "model.router_bias_rate=10.0",
    )),
    # A last layer that predicts further tokens, with biases of its own router.
    "ahead": (DEEPSEEK, (
        "parallel.schedule=1f1b", "parallel.ep=1", "train.seq_len=32", "data.source=dummy",
        "model.n_layers=3", "model.router_bias_rate=10.0",
    )),
}  # fmt: skip


def scores_of(theirs, tokens):
    """Return transformers' log-probabilities of all but the first token, and its best tokens."""
    logits = torch.from_numpy(logits_of(theirs, tokens[None].astype(np.int64)))[0, :-1]
    every = torch.log_softmax(logits.double(), -1).numpy()
    return np.take_along_axis(every, tokens[1:, None], -1)[:, 0], every.argmax(-1)


@pytest.mark.slow(unless=["tied", "experts"])
@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(tmp_path, case):
    name, overrides = CASES[case]
    theirs, directory = published(name)
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, VOCABULARY, length) for length in (17, 5, 1, 9, 17, 2)]
    lines = "".join(f"{json.dumps(row.tolist())}\n" for row in rows)
    (tmp_path / "tokens.jsonl").write_text(lines)
    words = [str(directory), str(tmp_path / "tokens.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    assert main([*words, *overrides.split(), "train.length_bucket=0"]) == 0
    found = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    for row, scores in zip(rows, found, strict=True):
        expected, _ = scores_of(theirs, row)
        np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)


def test_an_array_of_scores_and_which_tokens_are_greedy(tmp_path, capsys, monkeypatch):
    theirs, directory = published("llama")
    enough = 4 * theirs.num_parameters()  # for parameters without gradients
    monkeypatch.setattr(device_checks, "host_memory", lambda: enough)
    tokens = np.random.default_rng(1).integers(0, 96, (3, 12)).astype(np.int32)
    tokens[0, 7] = scores_of(theirs, tokens[0])[1][6]
    np.save(tmp_path / "tokens.npy", tokens)
    out = tmp_path / "out.npz"
    assert main([str(directory), str(tmp_path / "tokens.npy"), "--out", str(out)]) == 0
    assert f"scored 33 tokens; their log-probabilities are in {out}" in capsys.readouterr().out
    found = np.load(out)
    assert (found["logprobs"].dtype, found["logprobs"].shape) == (np.float32, (3, 11))
    for row, logprobs, greedy in zip(tokens, found["logprobs"], found["greedy"], strict=True):
        expected, best = scores_of(theirs, row)
        np.testing.assert_allclose(logprobs, expected, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(greedy, best == row[1:])
    assert found["greedy"][0, 6]


@pytest.mark.extended
@pytest.mark.slow(unless=["averaged"])
@pytest.mark.parametrize("run", RUNS)
def test_a_run_is_scored_as_it_is_evaluated(tmp_path, run):
    trainer, state, ids = saved_run(tmp_path / "run", *RUNS[run][1], config=RUNS[run][0])
    loss, _ = trainer.eval_step(
        state, trainer.put({"inputs": ids[..., :-1], "targets": ids[..., 1:]})
    )
    np.save(tmp_path / "ids.npy", ids.reshape(-1, ids.shape[-1]))
    out = tmp_path / "out.npz"
    words = [str(tmp_path / "run"), str(tmp_path / "ids.npy"), "--out", str(out)]
    assert main([*words, "parallel.pp=2"]) == 0
    np.testing.assert_allclose(-np.load(out)["logprobs"].mean(), loss, rtol=1e-6)


@pytest.mark.extended
def test_a_model_trained_with_a_capacity_is_scored_as_its_export(tmp_path):
    experts = "model.n_experts=4", "model.experts_per_token=2", "model.d_expert=16"
    narrow = *experts, "model.capacity_factor=0.5", "model.qk_norm=true"
    *_, ids = saved_run(tmp_path / "run", *narrow)
    saved, exported = str(tmp_path / "run" / "checkpoints" / "2"), str(tmp_path / "hf")
    assert checkpoint_command(["export", saved, exported]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    rows = ids.reshape(-1, ids.shape[-1])[:2]
    np.save(tmp_path / "ids.npy", rows)
    words = [str(tmp_path / "run"), str(tmp_path / "ids.npy"), "--out", str(tmp_path / "out.npz")]
    assert main(words) == 0
    for row, found in zip(rows, np.load(tmp_path / "out.npz")["logprobs"], strict=True):
        np.testing.assert_allclose(found, scores_of(theirs, row)[0], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_two_processes_score_as_one_device(tmp_path):
    """Each has a replica and a pipeline rank; a mesh without the devices of one is refused."""
    directory = published("qwen3_tied")[1]
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 96, (5, 12)))
    words = [str(directory), str(tmp_path / "ids.npy"), "--out"]
    assert main([*words, str(tmp_path / "one.npz")]) == 0
    command = [sys.executable, "-m", "jaxpipe.score", *words, str(tmp_path / "two.npz")]
    pipeline = ["parallel.pp=2", "parallel.dp=2", "runtime.cpu_devices=2"]
    (first, said), (other, silent) = ends(start_all(2, [*command, *pipeline]))
    assert (first, other) == (0, 0), said + silent
    assert "scored 55 tokens" in said
    assert "scored" not in silent
    one, two = (np.load(tmp_path / f"{name}.npz")["logprobs"] for name in ("one", "two"))
    np.testing.assert_allclose(two, one, rtol=0, atol=1e-5)
    for code, said in ends(start_all(2, [*command, "runtime.cpu_devices=1"])):
        assert code == 2
        assert "= 1 must equal the number of devices, 2" in said


def test_archives_hold_no_sequences(tmp_path):
    np.savez(tmp_path / "ids.npz", ids=np.ones((2, 3), int))
    with pytest.raises(ConfigError, match="ids.npz is neither .npy nor .jsonl"):
        read_sequences(tmp_path / "ids.npz")


@pytest.mark.parametrize(
    ("tokens", "words", "sentence"),
    [
        ([[1, 2], [3]], ["--out", "o.npz"], "their lengths differ"),
        ([[1, 96]], ["--out", "o.jsonl"], "sequence 0 of .* has the ids 1..96"),
        ([[1] * 66], ["--out", "o.jsonl"], "made for model.max_seq_len=64"),
        ([[1, 2]], ["--out", "o.txt"], "is neither .npz nor .jsonl"),
        ([[1, 2]], ["--out", "o.jsonl", "model.n_layers=1"], "model.n_layers is given by"),
        ([[1.5]], ["--out", "o.jsonl"], "is no list of one or more integers"),
        ([], ["--out", "o.jsonl"], "holds no sequence"),
    ],
)
def test_refusals(tmp_path, monkeypatch, capsys, tokens, words, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in tokens))
    assert main([str(published("gpt2")[1]), "t.jsonl", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert re.search(sentence, error), error
