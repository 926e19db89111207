"""AdamW and Muon by NumPy, after their papers: the expected parameters of a run.

Parameters are dicts by Hugging Face's names, arrays in torch's layouts.
"""

import re

import numpy as np

STEPS = 3
# Every group has another decay rate. The large eps keeps gradients that are only rounding, such
# as those of GPT-2's key biases, from deciding the sign of an update.
SETTINGS = {
    "lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-3, "muon_momentum": 0.95, "clip_norm": 0.5,
    "weight_decay": 0.1, "decay_of_embed_head": 0.5, "decay_of_vectors": 0.25,
}  # fmt: skip
_EMBED_HEAD = re.compile(r"embed_tokens|lm_head|wte|wpe")
_FUSED = "c_attn.weight"  # GPT-2's queries, keys and values, three matrices side by side


def group(name, array):
    """Return a parameter's group for weight decay and Muon: "embed_head", "vector" or "matrix"."""
    if array.ndim == 1:
        return "vector"
    return "embed_head" if _EMBED_HEAD.search(name) else "matrix"


def clipped(gradients):
    """Scale gradients so that their global norm is at most `clip_norm`."""
    norm = np.sqrt(sum((gradient**2).sum() for gradient in gradients.values()))
    scale = min(1.0, SETTINGS["clip_norm"] / norm)
    return {name: scale * gradient for name, gradient in gradients.items()}


def decayed(name, array):
    """Return decoupled weight decay (Loshchilov and Hutter 2019), before the learning rate."""
    factor = {"matrix": 1.0, "embed_head": SETTINGS["decay_of_embed_head"], "vector": None}[
        group(name, array)
    ]
    factor = SETTINGS["decay_of_vectors"] if factor is None else factor
    return SETTINGS["weight_decay"] * factor * array


def adam(state, name, gradient, step):
    """Return the update of Adam (Kingma and Ba 2015, algorithm 1), without the learning rate."""
    b1, b2 = SETTINGS["beta1"], SETTINGS["beta2"]
    m, v = state.get(name, (0.0, 0.0))
    state[name] = m, v = b1 * m + (1 - b1) * gradient, b2 * v + (1 - b2) * gradient**2
    return m / (1 - b1**step) / (np.sqrt(v / (1 - b2**step)) + SETTINGS["eps"])


def muon(state, name, gradient, step):
    """Return Muon's update of one matrix (Jordan et al. 2024), scaled as in Liu et al. 2025, eq. 4.

    Momentum is Nesterov's as in optax: an average of gradients, corrected for its first steps.
    """
    beta = SETTINGS["muon_momentum"]
    state[name] = mean = beta * state.get(name, 0.0) + (1 - beta) * gradient
    ahead = beta * mean / (1 - beta ** (step + 1)) + (1 - beta) * gradient / (1 - beta**step)
    return 0.2 * np.sqrt(max(gradient.shape)) * orthogonal(ahead)


def orthogonal(matrix):
    """Run five steps of the quintic Newton-Schulz iteration on the wide side, from a norm of 1.

    The matrix is divided by its norm plus 1e-8, as in optax (7 digits of the result depend on it).
    """
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonal(matrix.T).T
    x = matrix / (np.linalg.norm(matrix) + 1e-8)
    for _ in range(5):
        a, b, c = 3.4445, -4.7750, 2.0315
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def updated(optimizer, state, params, gradients, step):
    """Return the parameters after update number `step`, from 1, of "adamw" or "muon"."""
    after = {}
    for name, gradient in clipped(gradients).items():
        if optimizer == "adamw" or group(name, gradient) != "matrix":
            made = adam(state, name, gradient, step)
        elif name.endswith(_FUSED):
            parts = np.split(gradient, 3, axis=1)
            made = [muon(state, f"{name}.{i}", part, step) for i, part in enumerate(parts)]
            made = np.concatenate(made, axis=1)
        else:
            made = muon(state, name, gradient, step)
        after[name] = params[name] - SETTINGS["lr"] * (made + decayed(name, params[name]))
    return after
