"""Batch rows of each token's neighbours, for models that read or predict several at a position.

The host computes them, so that a device needs no tokens of another sequence shard or slice, and so
that no position reads or predicts a token of another document.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpipe.model.family import ModelConfig
from jaxpipe.model.loss import IGNORE

NO_TOKEN = -1  # stands for tokens before the first of a row or document


def neighbour_keys(model: ModelConfig) -> tuple[str, ...]:
    """Names of the batch's arrays that the host computes of a token's neighbours for a model."""
    return ahead_keys(model.tokens_ahead) + before_keys(model.tokens_before)


def neighbour_rows(batch: Mapping[str, Any], model: ModelConfig) -> dict[str, np.ndarray]:
    """These arrays by name, of a host batch as `rows_ahead` and `rows_before` read it."""
    return rows_ahead(batch, model.tokens_ahead) | rows_before(batch, model.tokens_before)


def ahead_keys(depth: int) -> tuple[str, ...]:
    """Names of the batch's arrays for `depth` further tokens.

    >>> ahead_keys(1)
    ('inputs_ahead_1', 'targets_ahead_1')
    """
    return tuple(f"{name}_ahead_{k}" for k in range(1, depth + 1) for name in ("inputs", "targets"))


def before_keys(count: int) -> tuple[str, ...]:
    """Names of the batch's arrays for the `count` tokens before each.

    >>> before_keys(2)
    ('inputs_before_1', 'inputs_before_2')
    """
    return tuple(f"inputs_before_{k}" for k in range(1, count + 1))


def rows_ahead(batch: Mapping[str, Any], depth: int) -> dict[str, np.ndarray]:
    """Inputs and targets of the tokens 1 to `depth` places ahead, by name.

    Args:
      batch: host arrays `[..., L]`: `inputs`, `targets` (-100: ignored), and of packed rows
        `segments`, the number of each token's document.
      depth: how many tokens ahead.

    Returns:
      `inputs_ahead_k` and `targets_ahead_k`, `[..., L]`: the input k places ahead, and its target,
      which is the token k + 1 places ahead. Where the row or the document ends before that they
      are 0 and -100.

    >>> batch = {"inputs": np.array([[5, 6, 7, 8]]), "targets": np.array([[6, 7, -100, 9]])}
    >>> batch["segments"] = np.array([[0, 0, 0, 1]])
    >>> {name: rows.tolist() for name, rows in rows_ahead(batch, 1).items()}
    {'inputs_ahead_1': [[6, 7, 0, 0]], 'targets_ahead_1': [[7, -100, -100, -100]]}
    """
    rows = {}
    segments = batch.get("segments", np.zeros_like(batch["inputs"]))
    for k in range(1, depth + 1):
        reaches = _shifted(segments, k, -1) == segments
        reaches[..., -k:] = False
        for name, otherwise in (("inputs", 0), ("targets", IGNORE)):
            ahead = _shifted(batch[name], k, otherwise)
            rows[f"{name}_ahead_{k}"] = np.where(reaches, ahead, otherwise).astype(np.int32)
    return rows


def rows_before(batch: Mapping[str, Any], count: int) -> dict[str, np.ndarray]:
    """The inputs 1 to `count` places before each, by name.

    Args:
      batch: host arrays `[..., L]`, as `rows_ahead` reads them.
      count: how many tokens before.

    Returns:
      `inputs_before_k`, `[..., L]`, with `NO_TOKEN` where the row or the document begins after it.

    >>> batch = {"inputs": np.array([[5, 6, 7, 8]]), "segments": np.array([[0, 0, 0, 1]])}
    >>> {name: rows.tolist() for name, rows in rows_before(batch, 2).items()}
    {'inputs_before_1': [[-1, 5, 6, -1]], 'inputs_before_2': [[-1, -1, 5, -1]]}
    """
    tokens, rows = batch["inputs"], {}
    segments = batch.get("segments", np.zeros_like(tokens))
    for k, name in enumerate(before_keys(count), 1):
        found = np.full(tokens.shape, NO_TOKEN, np.int32)
        is_same = segments[..., k:] == segments[..., :-k]
        found[..., k:] = np.where(is_same, tokens[..., :-k], NO_TOKEN)
        rows[name] = found
    return rows


def _shifted(rows: np.ndarray, places: int, otherwise: int) -> np.ndarray:
    """Every value `places` earlier in its row; `otherwise` at the end."""
    filled = np.full_like(rows, otherwise)
    filled[..., :-places] = rows[..., places:]
    return filled
