"""The DPO loss of the package trl on the records' Llama, written to `tests/data/outside`.

    pip install torch transformers trl numpy
    python tests/support/record_trl.py

Nothing of jaxpipe is imported. `dpo.npz` has rows of chosen and rejected answers in turn, `tokens`
`[M, B, L + 1]` and `counted` `[M, B, L + 1]` (which tokens are of an answer), log-probabilities of
a reference model `reference` `[M, B, L + 1]` (float64, 0 where no token counts), and what trl makes
of the weights of `llama.npz`: `loss` and `gradients` (float64, in the order of that file's
`shapes`), with `beta`.
"""

import json
import tempfile

import numpy as np
import torch
import transformers
from datasets import Dataset
from record_transformers import OUT, VOCABULARY, build, drawn, float64
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import DPOConfig, DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

MICROBATCHES, PAIRS, LENGTH, BETA = 4, 2, 8, 0.3


def pairs():
    """Return pairs of answers to one prompt as ids, of differing lengths."""
    rng = np.random.default_rng(3)

    def ids(least, most):
        return rng.integers(1, VOCABULARY, rng.integers(least, most + 1)).tolist()

    return [
        {"prompt_ids": ids(1, 4), "chosen_ids": ids(1, 5), "rejected_ids": ids(1, 5)}
        for _ in range(MICROBATCHES * PAIRS)
    ]


def with_weights(model, prefix, kept=None):
    """Give a model the record's weights, or others drawn by name, and return it."""
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            value = drawn(prefix + name, tuple(tensor.shape)) if kept is None else kept[name]
            tensor.copy_(torch.from_numpy(value.astype(np.float64)))
    return model


def words():
    """Return a tokenizer of as many words as the model has ids."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="w0", eos_token="w1"
    )


def trainer_of(model, reference, folder):
    """Return trl's trainer of the two models."""
    settings = DPOConfig(
        output_dir=folder, beta=BETA, report_to="none", bf16=False, use_cpu=True,
        gradient_checkpointing=False, disable_dropout=False,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": "w2", "chosen": "w3", "rejected": "w4"}])
    return DPOTrainer(model, reference, settings, train_dataset=data, processing_class=words())


def as_rows(per_row):
    """Put trl's rows, all chosen before all rejected, `[2 N, ...]`, in pairs `[M, B, ...]`."""
    both = np.stack(np.split(per_row, 2), axis=1)
    return both.reshape(MICROBATCHES, 2 * PAIRS, *per_row.shape[1:])


def recorded():
    """Return all arrays of the record by name."""
    with np.load(OUT / "llama.npz") as file:
        shapes, flat = json.loads(str(file["shapes"])), file["weights"]
    sizes = [int(np.prod(shape)) for shape in shapes.values()]
    parts = np.split(flat, np.cumsum(sizes)[:-1])
    kept = {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts)}
    batch = DataCollatorForPreference(pad_token_id=0, pad_to_multiple_of=LENGTH + 1)(pairs())
    assert batch["input_ids"].shape[1] == LENGTH + 1
    build("llama")  # modules imported here must not see float32 replaced
    with float64(), tempfile.TemporaryDirectory() as folder:
        model = with_weights(build("llama"), "", kept)
        reference = with_weights(build("llama"), "reference ")
        trainer = trainer_of(model, reference, folder)
        with torch.no_grad():
            logprobs = torch.log_softmax(reference(batch["input_ids"]).logits[:, :-1], -1)
        ids = batch["input_ids"][:, 1:, None]
        found = logprobs.gather(-1, ids)[..., 0] * batch["completion_mask"][:, 1:]
        loss = trainer._compute_loss(model, dict(batch), False)
        loss.backward()
        gradients = dict(model.named_parameters())
        assert loss.dtype == torch.get_default_dtype()
        return {
            "tokens": as_rows(batch["input_ids"].numpy().astype(np.int32)),
            "counted": as_rows(batch["completion_mask"].numpy().astype(bool)),
            "reference": as_rows(np.pad(found.numpy(), ((0, 0), (1, 0)))),
            "beta": np.array(BETA), "loss": loss.detach().numpy(),
            "gradients": np.concatenate([gradients[name].grad.numpy().ravel() for name in shapes]),
        }  # fmt: skip


if __name__ == "__main__":
    np.savez_compressed(OUT / "dpo.npz", **recorded())
