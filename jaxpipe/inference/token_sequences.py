"""Files of token ids to score, and files of scores. Importing this imports no jax."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from jaxpipe.config import ConfigError
from jaxpipe.runtime.storage.writing import replace_atomically

JSON_LINES = ".jsonl"


def read_sequences(path: Path) -> list[np.ndarray]:
    """Read sequences of token ids: the rows of a `.npy`, or the lists of a `.jsonl`, one a line.

    Raises `ConfigError` where the file is neither, or holds other than sequences of ids.
    """
    if path.suffix not in (JSON_LINES, ".npy"):
        raise ConfigError(f"{path} is neither .npy nor .jsonl: give token ids as one of these.")
    try:
        if path.suffix == JSON_LINES:
            lines = path.read_text().splitlines()
            rows = [np.array(json.loads(line)) for line in lines if line.strip()]
        else:
            rows = list(np.load(path, allow_pickle=False))
    except (OSError, ValueError, EOFError, TypeError) as error:
        raise ConfigError(
            f"{path} holds no token ids ({error}): give a .npy of integers [N, L], or a .jsonl "
            f"with a list of ids on each line."
        ) from error
    for number, row in enumerate(rows):
        if row.ndim != 1 or not row.size or not np.issubdtype(row.dtype, np.integer):
            raise ConfigError(
                f"sequence {number} of {path}, counted from 0, is no list of one or more integers: "
                f"give a .npy of integers [N, L], or a .jsonl with a list on each line."
            )
    if not rows:
        raise ConfigError(f"{path} holds no sequence: give at least one.")
    return rows


def check_ids(rows: Sequence[np.ndarray], place: Path, vocab_size: int, longest: int) -> None:
    """Raise `ConfigError` for ids outside the vocabulary, and for a sequence that is too long.

    `longest` is the most tokens that the model reads; 0: any. The last token of a sequence is a
    target alone, and not read.
    """
    for number, row in enumerate(rows):
        if row.min() < 0 or row.max() >= vocab_size:
            raise ConfigError(
                f"sequence {number} of {place} has the ids {row.min()}..{row.max()}, but "
                f"model.vocab_size={vocab_size}: give ids of this model's tokenizer."
            )
        if longest and len(row) - 1 > longest:
            raise ConfigError(
                f"sequence {number} of {place} has {len(row)} tokens, but the model is made for "
                f"model.max_seq_len={longest}: cut it."
            )


def write_scores(path: Path, scores: Sequence[Any]) -> None:
    """Write `SequenceScores`: a `.jsonl` with a list of log-probabilities per line, or a `.npz`.

    The `.npz` has `logprobs` and `greedy`, `[N, L - 1]`; all sequences must have L tokens. Raises
    `ConfigError` where the file cannot be written.
    """
    if path.suffix == JSON_LINES:
        lines = (json.dumps([float(str(value)) for value in one.logprobs]) for one in scores)
        return write_out(
            path, lambda file: file.write("".join(f"{line}\n" for line in lines).encode())
        )
    arrays: dict[str, Any] = {
        name: np.stack([getattr(one, name) for one in scores]) for name in scores[0]._fields
    }
    return write_out(path, lambda file: np.savez(file, **arrays))


def check_out(path: Path, rows: Sequence[np.ndarray]) -> None:
    """Raise `ConfigError` unless scores of these sequences can be written in the file's format."""
    if path.suffix not in (JSON_LINES, ".npz"):
        raise ConfigError(f"--out {path} is neither .npz nor .jsonl: give one of these.")
    if path.suffix == ".npz" and len({len(row) for row in rows}) > 1:
        raise ConfigError(
            f"--out {path} has one array for all sequences, but their lengths differ: give a "
            f".jsonl."
        )


def write_out(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Write the file of `--out`, which gets its name when it is complete."""
    try:
        with replace_atomically(path) as file:
            write(file)
    except OSError as error:
        raise ConfigError(
            f"--out {path} cannot be written ({error.strerror}): choose a directory that exists "
            f"and is writable."
        ) from error
