"""Completions by the states of a trainer, on any mesh and with any loss."""

import sys

import jax
import numpy as np
import pytest
from commands import SMALL

from jaxpipe import config as configs
from jaxpipe.config import ConfigError
from jaxpipe.inference.generation import Generator
from jaxpipe.inference.sampling import Sampling
from jaxpipe.training.scores import BatchScores
from jaxpipe.training.trainer import Trainer

T, NEW = 0.7, 6
LOSS = """
def loss(logprobs, rows):
    return -(logprobs * rows["gain"]).sum(), (rows["targets"] != -100).sum()
"""
OWN = "train.loss=own_loss:loss", 'train.loss_rows=["gain"]'
TINY = (
    "model.n_layers=2", "model.d_model=32", "model.max_seq_len=64", "train.seq_len=16",
    "train.grad_accum_steps=2", "parallel.dp=1", "train.loss_chunks=2",
)  # fmt: skip
MESHES = {
    "one": ("parallel.pp=1", "train.microbatch_size=2"),
    "tp": ("parallel.pp=1", "parallel.tp=2", "train.microbatch_size=2"),
    "pp": ("parallel.pp=2", "train.microbatch_size=2", "parallel.schedule=zb_h1"),
    "dp": ("parallel.pp=1", "parallel.dp=2", "train.microbatch_size=1", "parallel.zero_stage=3"),
}
WHOLE = {  # a loss of whole rows excludes these
    "cp": ("parallel.pp=1", "parallel.dp=2", "parallel.cp=2", "train.microbatch_size=2"),
    "slices": ("parallel.pp=2", "parallel.slices=2", "train.microbatch_size=2",
               "parallel.schedule=1f1b"),
    "sequence": ("parallel.pp=2", "parallel.tp=2", "parallel.sequence_parallel=true",
                 "parallel.vocab_parallel_pp=true", "train.microbatch_size=2"),
    "dropout, packed": ("parallel.pp=2", "model.dropout=0.5", "data.packing=best_fit",
                        "train.microbatch_size=2"),
}  # fmt: skip
PROMPTS = [[100, 101, 102], [32], [97, 98, 99, 100, 101], [7, 8], [9, 10, 11, 12]]


@pytest.fixture(autouse=True)
def own_loss(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_loss", raising=False)
    (tmp_path / "own_loss.py").write_text(LOSS)


def trainer_of(*overrides):
    config = configs.load(SMALL, [*TINY, *overrides])
    return Trainer.resolve(config, jax.devices()[: config.parallel.devices])


def check_scores(trainer, state, made, prompts=PROMPTS):
    """The log-probabilities are those that `BatchScores` gives the same tokens at T."""
    shape = (*trainer.config.batch_shape.values(), trainer.config.train.seq_len)
    batch = {"inputs": np.zeros(shape, np.int32), "targets": np.full(shape, -100, np.int32)}
    rows = {name: leaf.reshape(-1, shape[-1]) for name, leaf in batch.items()}
    for number, (prompt, one) in enumerate(zip(prompts[: len(rows["inputs"])], made)):
        tokens = [*prompt, *one.tokens]
        rows["inputs"][number, : len(tokens) - 1] = tokens[:-1]
        rows["targets"][number, len(prompt) - 1 : len(tokens) - 1] = one.tokens
    scores = BatchScores(trainer, temperature=T)(state.params, batch, state.variables)
    scored = scores.logprobs_BL.reshape(-1, shape[-1])
    for number, (prompt, one) in enumerate(zip(prompts[: len(scored)], made)):
        begin = len(prompt) - 1
        np.testing.assert_allclose(
            one.logprobs, scored[number, begin : begin + len(one.tokens)], rtol=0, atol=2e-5
        )


@pytest.mark.extended
@pytest.mark.parametrize("mesh", MESHES)
def test_states_of_a_trainer_with_its_own_loss_complete_alike(mesh):
    trainer = trainer_of(*OWN, *MESHES[mesh])
    state = trainer.init()
    generator = Generator.of_trainer(trainer, Sampling(T))
    limits = [NEW, 2, 0, NEW, 3]
    made = generator.generate(PROMPTS, limits, seed=5, state=state)
    assert [len(one.tokens) for one in made] == limits
    check_scores(trainer, state, made)
    alone = trainer_of(*MESHES["one"])
    want = Generator.of_trainer(alone, Sampling(T)).generate(
        PROMPTS, limits, seed=5, state=alone.init()
    )
    assert [one.tokens for one in made] == [one.tokens for one in want]


@pytest.mark.extended
@pytest.mark.slow(unless=["slices"])
@pytest.mark.parametrize("mesh", WHOLE)
def test_any_mesh_completes_as_one_device(mesh):
    made = []
    for layout in (WHOLE[mesh], MESHES["one"]):
        trainer = trainer_of(*layout)
        generator = Generator.of_trainer(trainer, Sampling(T))
        made.append(generator.generate(PROMPTS, NEW, seed=5, state=trainer.init()))
    got, want = made
    assert [one.tokens for one in got] == [one.tokens for one in want]
    for one, other in zip(got, want):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=2e-5)


@pytest.mark.extended
def test_a_trainer_of_pairs_completes():
    pairs = "train.loss=dpo", "data.source=file", "data.path=nowhere"
    trainer = trainer_of(*pairs, *MESHES["pp"])
    state = trainer.init()
    made = Generator.of_trainer(trainer, Sampling(T)).generate(PROMPTS[:2], NEW, state=state)
    assert [len(one.tokens) for one in made] == [NEW, NEW]


def test_the_seed_is_an_argument_of_the_program():
    """The same seed repeats, rows and seeds differ, and no seed compiles anew."""
    trainer = trainer_of(*MESHES["one"])
    generator, state = Generator.of_trainer(trainer, Sampling(1.0)), trainer.init()

    def tokens(seed):
        made = generator.generate([[5]] * 3, NEW, seed=seed, state=state)
        return [tuple(one.tokens) for one in made]

    first = tokens(0)
    programs = generator.cached_model(64).next._cache_size()
    assert len(set(first)) == 3
    assert tokens(0) == first
    assert not set(tokens(1)) & set(first)
    assert generator.cached_model(64).next._cache_size() == programs
    stopped = generator.generate([[5]], NEW, lambda number, made: len(made) == 2, state=state)
    assert tuple(stopped[0].tokens) == first[0][:2]
    assert len(stopped[0].logprobs) == 2


@pytest.mark.parametrize(
    ("prompts", "tokens", "sentence"),
    [
        ([], 1, "there is no prompt: give at least one"),
        ([[]], 1, "prompt 0 has no token"),
        ([[1], [256]], 1, "prompt 1 has the ids 256 to 256, but tokens are 0 to 255"),
        ([[-1]], 1, "prompt 0 has the ids -1"),
        ([[1] * 60], 5, "has 60 tokens and max_tokens=5, but the model is made for model.max_seq"),
        ([[1]], -1, "max_tokens=-1"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused(prompts, tokens, sentence):
    generator = Generator.of_trainer(trainer_of(*MESHES["one"]))
    with pytest.raises(ConfigError, match=sentence):
        generator.generate(prompts, tokens)
