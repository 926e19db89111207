"""`python -m jaxpipe.inference.grpo_example CONFIG [section.key=value ...]`: GRPO, to be copied.

An iteration generates answers, rewards them, scores them with the policy and with a copy of the
first model, and makes EPOCHS steps on the clipped ratio with a KL penalty (Shao et al. 2024,
section 4.1). checkpoint.resume=PATH starts from a run, a checkpoint, or a model's directory from
Hugging Face, of the model of CONFIG; the same command goes on from run.dir.

Exit codes: those of `python -m jaxpipe.train`.
"""

import sys
from argparse import Namespace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe import config as configs
from jaxpipe.checkpoint import CheckpointStore, StateKeying
from jaxpipe.config.arguments import parse, parser_of
from jaxpipe.inference.command import start_devices
from jaxpipe.inference.generation import Generator
from jaxpipe.inference.loaded_model import initial_state
from jaxpipe.inference.sampling import Sampling
from jaxpipe.inference.saved_model import SavedModel
from jaxpipe.runtime import command, processes
from jaxpipe.training.scores import BatchScores
from jaxpipe.training.trainer import Trainer
from jaxpipe.training.weights import stream_weights

# Bytes are tokens here; `jaxpipe.inference.text.tokenizer_of(saved).encode` has those of a model.
PROMPTS, GROUP, NEW = (b"def ", b"class ", b"import "), 4, 16  # answers to a prompt, their tokens
EPOCHS, CLIP, BETA, ENTROPY = 2, 0.2, 0.04, 0.001
OWN = [
    "train.loss=jaxpipe.inference.grpo_example:loss",
    'train.loss_rows=["advantages", "old_logprobs", "reference_logprobs"]',
    "train.loss_temperature=0.9",
]


def loss(logprobs: jax.Array, rows: dict[str, jax.Array], entropy: jax.Array) -> tuple:
    """GRPO's loss of a microbatch of arrays `[B, L]` (see jaxpipe/model/objective.py)."""
    ratio, gain = jnp.exp(logprobs - rows["old_logprobs"]), rows["advantages"]
    gained = jnp.minimum(ratio * gain, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * gain)
    gap, counts = rows["reference_logprobs"] - logprobs, rows["targets"] != -100
    kl = jnp.exp(gap) - gap - 1  # an unbiased, positive estimate (Schulman 2020)
    total = -jnp.where(counts, gained - BETA * kl + ENTROPY * entropy, 0).sum()
    clipped = jnp.where(counts & (jnp.abs(ratio - 1) > CLIP), 1.0, 0).sum()
    return total, counts.sum(), {"kl": jnp.where(counts, kl, 0).sum(), "clipped": clipped}


def reward(answer: list[int]) -> float:
    """Yours: here the share of lower-case vowels."""
    return float(np.isin(answer, list(b"aeiou")).mean())


def batch_of(config: configs.Config, prompts: list[list[int]], answers: list[list[int]]) -> dict:
    """Arrays `[M, B, L]` of prompts and answers, in which the answers' tokens are targets."""
    shape = (*config.batch_shape.values(), config.train.seq_len)
    batch = {"inputs": np.zeros(shape, np.int32), "targets": np.full(shape, -100, np.int32)}
    batch["real"] = np.zeros(shape, bool)  # padding, which no expert takes
    rows = {name: leaf.reshape(-1, shape[-1]) for name, leaf in batch.items()}
    for row, (prompt, answer) in enumerate(zip(prompts, answers)):
        tokens = np.array(prompt + answer)
        rows["inputs"][row, : len(tokens) - 1] = tokens[:-1]
        rows["targets"][row, len(prompt) - 1 : len(tokens) - 1] = answer
        rows["real"][row, : len(tokens) - 1] = True
    return batch


def train(arguments: Namespace) -> None:
    """Train as CONFIG and further settings say, on all devices of jax."""
    start_devices(arguments.overrides)
    trainer = Trainer.resolve(configs.load(arguments.config, [*OWN, *arguments.overrides]))
    config, samples = trainer.config, trainer.samples_per_step
    score = BatchScores(trainer)  # at the temperature of the loss
    generator = Generator.of_trainer(trainer, Sampling(config.train.loss_temperature))
    resume, keying = config.checkpoint.resume, StateKeying(trainer.layout, trainer.sharding)
    saved = None if resume == "auto" else SavedModel.open(resume)
    state = initial_state(saved, trainer) if saved else trainer.init()
    reference = jax.tree.map(jnp.copy, state.params)  # a step overwrites the state that it gets
    folder, keep = Path(config.run.dir, "checkpoints"), config.checkpoint.keep
    with CheckpointStore(folder, keep=keep, asynchronous=False, keying=keying) as checkpoints:
        if newest := checkpoints.restore(trainer.state_shapes.parts(), print):
            state = trainer.state_of(newest[0], newest[1]["guard"])
        for iteration in range(int(state.step) // EPOCHS, config.train.steps // EPOCHS):
            # As `generate` takes them; with schedule_free the ratio corrects for those of a step.
            policy = trainer.averaged(state)
            prompts = [[*PROMPTS[row // GROUP % len(PROMPTS)]] for row in range(samples)]
            made = generator.generate(prompts, NEW, seed=iteration, state=state)
            answers = [one.tokens for one in made]
            batch = batch_of(config, prompts, answers)
            batch = score.record_routes(policy, batch, state.variables)  # for experts; replayed
            old = score(policy, batch, state.variables).logprobs_BL
            rewards = np.array([reward(answer) for answer in answers]).reshape(-1, GROUP)
            gain = (rewards - rewards.mean(1)[:, None]) / (rewards.std(1)[:, None] + 1e-6)
            batch["advantages"] = np.broadcast_to(gain.reshape(*old.shape[:2], 1), old.shape)
            scored = score(reference, batch, state.variables).logprobs_BL
            batch["reference_logprobs"] = np.asarray(scored)
            for step in range(iteration * EPOCHS, (iteration + 1) * EPOCHS):  # over one rollout
                rows = trainer.put(batch | {"old_logprobs": old}, step * samples)
                state, metrics = trainer.train_step(state, rows)
            if processes.first():
                found = {name: round(float(metrics[name]), 5) for name in ("loss", "kl", "clipped")}
                print(f"step {step + 1} reward {rewards.mean():.4f} {found}", flush=True)
            meta = {"config": configs.to_toml(config), "guard": state.guard.saved(), "position": 0}
            checkpoints.save(step + 1, state.parts(), meta)
    for name, array in stream_weights(trainer, state):  # to an inference server
        assert np.isfinite(array).all(), name


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = parser_of("inference.grpo_example", __doc__ or "")
    return command.run(lambda: train(parse(parser, argv)))


if __name__ == "__main__":
    sys.exit(main())
