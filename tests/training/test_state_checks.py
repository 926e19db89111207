"""States, batches and arguments that no step, score or generation can use: a sentence each."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import SMALL

from jaxpipe import config as configs
from jaxpipe.config import ConfigError
from jaxpipe.inference.generation import Generator
from jaxpipe.inference.sampling import Sampling, key_of
from jaxpipe.training.batch_sharder import random_batch
from jaxpipe.training.scores import BatchScores
from jaxpipe.training.trainer import Trainer

TINY = (
    "parallel.pp=1", "parallel.dp=1", "model.n_layers=1", "model.d_model=16", "model.n_heads=2",
    "model.n_kv_heads=2", "model.d_ff=16", "model.max_seq_len=32", "train.seq_len=8",
    "train.grad_accum_steps=2", "train.microbatch_size=2",
)  # fmt: skip


@cache
def trainer_of(*overrides):
    config = configs.load(SMALL, [*TINY, *overrides])
    return Trainer.resolve(config, jax.devices()[: config.parallel.devices])


def uses_of(trainer, state):
    """The functions of the Python API that read a state."""
    host = random_batch(trainer.config)
    return {
        "train_step": lambda: trainer.train_step(state, trainer.put(host, 0)),
        "eval_step": lambda: trainer.eval_step(state, trainer.put(host)),
        "scores": lambda: BatchScores(trainer)(state.params, host, state.variables),
        "generate": lambda: Generator.of_trainer(trainer).generate([[1, 2]], 2, state=state),
    }


def narrowed(state):
    return state._replace(params=jax.tree.map(lambda leaf: leaf.astype("bfloat16"), state.params))


def used(state):
    jax.tree.map(lambda leaf: leaf.delete(), state)
    return state


STATES = {
    r"params.* is gone: a step overwrites the arrays": lambda: used(trainer_of().init()),
    r"params\S* is \[256, 32\], but \[256, 16\]": lambda: trainer_of("model.d_model=32").init(),
    r"has \S*params\['layers'\]\[1\]": lambda: trainer_of("model.n_layers=2").init(),
    r"is on cpu:0, cpu:1, and not as this trainer's mesh": lambda: trainer_of(
        "parallel.dp=2", "train.microbatch_size=1"
    ).init(),
}


@pytest.mark.parametrize("sentence", STATES)
@pytest.mark.parametrize("name", ["train_step", "eval_step", "scores", "generate"])
def test_states_of_no_use(name, sentence):
    use = uses_of(trainer_of(), STATES[sentence]())[name]
    with pytest.raises(ConfigError, match=sentence):
        use()


@pytest.mark.parametrize("name", ["train_step", "eval_step"])
def test_a_narrower_state(name):
    with pytest.raises(ConfigError, match="is bfloat16, but a step keeps it in float32: cast it"):
        uses_of(trainer_of(), narrowed(trainer_of().init()))[name]()


def test_what_is_no_state():
    trainer, state = trainer_of(), trainer_of().init()
    host = random_batch(trainer.config)
    with pytest.raises(ConfigError, match="the state is a dict: make it by Trainer.init"):
        trainer.train_step(state.params, trainer.put(host, 0))
    with pytest.raises(ConfigError, match=r"params lacks params\['embed_head'\]\['embed'\]"):
        BatchScores(trainer)(state, host)
    with pytest.raises(ConfigError, match="there are no parameters: give generate"):
        Generator.of_trainer(trainer).generate([[1]], 1)


def test_batches_that_put_did_not_make():
    trainer, state = trainer_of(), trainer_of().init()
    host = random_batch(trainer.config)
    twice = {name: np.concatenate([leaf, leaf], 1) for name, leaf in host.items()}
    with pytest.raises(ConfigError, match=r"\[2, 4, 8\] .* reads \[2, 2\] rows: put it there by"):
        trainer.train_step(state, twice)
    other = trainer_of("parallel.dp=2", "train.microbatch_size=1")
    with pytest.raises(ConfigError, match="inputs of the batch is on cpu:0, cpu:1, and not as"):
        trainer.train_step(state, other.put(host, 0))
    for batch, sentence in (([1], "the batch is a list"), ({"inputs": 0}, "has no 'targets'")):
        with pytest.raises(ConfigError, match=sentence):
            trainer.put(batch)
    with pytest.raises(ConfigError, match="has no 'inputs'"):
        BatchScores(trainer)(state.params, {"targets": host["targets"]})
    with pytest.raises(ConfigError, match="inputs of the batch is traced"):
        jax.jit(lambda ids: trainer.put(host | {"inputs": ids}))(host["inputs"])


@pytest.mark.parametrize("position", [-1, 1.0, "1", True, np.arange(2)], ids=str)
def test_positions(position):
    with pytest.raises(ConfigError, match="give the number of its first sample"):
        trainer_of().put(random_batch(trainer_of().config), position)


@pytest.mark.parametrize("value", [0, -1.0, 1e-7, np.inf, np.nan, "1", True, np.ones(2)], ids=str)
def test_temperatures(value):
    with pytest.raises(ConfigError, match=r"temperature=.*: give 1e-06 to 1e\+06"):
        BatchScores(trainer_of(), temperature=value)
    if not isinstance(value, int) or value:  # 0 is greedy
        with pytest.raises(ConfigError, match="give 0 for the most likely token, or 1e-06"):
            Sampling(value)


@pytest.mark.parametrize("value", [0.0, -0.1, 1.1, np.nan, "1"], ids=str)
def test_shares_of_the_nucleus(value):
    with pytest.raises(ConfigError, match="give a share above 0 and at most 1"):
        Sampling(1.0, value)


@pytest.mark.parametrize("value", [-1, 257, 1.5, True, None], ids=str)
def test_numbers_of_most_likely_tokens(value):
    with pytest.raises(ConfigError, match="give 0 to model.vocab_size=256 tokens"):
        BatchScores(trainer_of(), top=value)


@pytest.mark.parametrize("value", [1.5, "a", None, True, 2**63, np.arange(2)], ids=str)
def test_seeds(value):
    with pytest.raises(ConfigError, match="give an integer of 64 bits"):
        key_of(value)


@pytest.mark.parametrize(
    ("prompts", "max_tokens", "sentence"),
    [
        ("abc", 1, "prompts are a str: give a list of lists of ids"),
        ([1, 2], 1, r"prompt 0 is int64\[\]: give a list of token ids"),
        ([[1], [1.5]], 1, r"prompt 1 is float64\[1\]"),
        ([[[1], [1, 2]]], 1, "prompt 0 is no list of token ids"),
        ([[1], [2]], [1, 2, 3], "one for each of 2 prompts"),
        ([[1]], 2.5, "give one integer"),
        ([[1]], None, "give one integer"),
        (np.zeros((0, 3), int), 1, "there is no prompt"),
        (np.full((2, 3), 256), 1, "prompt 0 has the ids 256 to 256"),
    ],
)
def test_prompts(prompts, max_tokens, sentence):
    generator, state = Generator.of_trainer(trainer_of()), trainer_of().init()
    with pytest.raises(ConfigError, match=sentence):
        generator.generate(prompts, max_tokens, state=state)


@pytest.mark.extended
def test_states_that_a_step_takes():
    """In numpy, and within another compiled function."""
    trainer = trainer_of()
    placed = trainer.put(random_batch(trainer.config), 0)
    _, want = trainer.train_step(trainer.init(), placed)
    _, numpys = trainer.train_step(jax.tree.map(np.asarray, trainer.init()), placed)
    assert float(want["loss"]) == float(numpys["loss"])
    copied = jax.tree.map(jnp.copy, trainer.init())
    assert float(trainer.train_step(copied, placed)[1]["loss"]) == float(want["loss"])
