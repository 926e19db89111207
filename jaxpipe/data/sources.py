"""From the `[data]` table of a configuration to training and held-out samples."""

from dataclasses import dataclass
from pathlib import Path

from jaxpipe.config import ConfigError, DataConfig
from jaxpipe.data.batches import Split, heldout_order, training_order
from jaxpipe.data.corpus import stdlib_corpus
from jaxpipe.data.samples import DummySamples, Samples, cut_samples
from jaxpipe.data.tokens import Tokens, open_tokens

DUMMY_SAMPLES = 1 << 20

Part = tuple[Samples, str]  # and what tells them from other samples


@dataclass(frozen=True)
class Data:
    """What a run reads: training samples without end, and held-out ones in a fixed order."""

    train: Split
    heldout: Split


def open_data(
    config: DataConfig, *, seq_len: int, vocab_size: int, seed: int, directory: Path
) -> Data:
    """Open and check the source that a configuration names.

    `seq_len` is in tokens, `seed` >= 0 decides the order (and the tokens of `dummy`), `directory`
    is where the text of `stdlib` is kept. No token is in both splits: the held-out one is the last
    `heldout_fraction` of the tokens of a file, unless it has a file of its own.

    Raises `ConfigError` for every fault of the data: a file missing, empty, truncated or of another
    kind, too few tokens for one sample, a token id outside the vocabulary.
    """
    if config.source == "dummy":
        parts = _dummy_parts(config, seq_len, vocab_size, seed)
    else:
        parts = _file_parts(config, seq_len, vocab_size, directory)
    (train, train_name), (heldout, heldout_name) = parts
    order_seed = seed if config.shuffle else None
    return Data(
        train=Split(
            "training",
            f"{train_name} seq_len={seq_len} shuffle={order_seed}",
            train,
            training_order(len(train), order_seed),
        ),
        heldout=Split(
            "held-out", f"{heldout_name} seq_len={seq_len}", heldout, heldout_order(len(heldout))
        ),
    )


def _dummy_parts(config: DataConfig, seq_len: int, vocab_size: int, seed: int) -> tuple[Part, Part]:
    cut = DUMMY_SAMPLES - round(config.heldout_fraction * DUMMY_SAMPLES)
    train, heldout = (
        (DummySamples(seed, vocab_size, seq_len, part), f"dummy {seed=} {vocab_size=} {part}")
        for part in (range(cut), range(cut, DUMMY_SAMPLES))
    )
    return train, heldout


def _file_parts(
    config: DataConfig, seq_len: int, vocab_size: int, directory: Path
) -> tuple[Part, Part]:
    train, heldout = (
        (cut_samples(tokens, seq_len), f"{config.source} {tokens.digest} tokens={len(tokens)}")
        for tokens in _open_files(config, vocab_size, directory)
    )
    return train, heldout


def _open_files(config: DataConfig, vocab_size: int, directory: Path) -> tuple[Tokens, Tokens]:
    if config.source == "stdlib":
        if vocab_size < 256:
            raise ConfigError(
                f"data.source = 'stdlib' is bytes, 0..255, but model.vocab_size={vocab_size}: use "
                f"model.vocab_size=256 or more."
            )
        paths = stdlib_corpus(directory, config.heldout_fraction)
    elif not config.path:
        raise ConfigError("data.source = 'file' needs data.path: set it to a .bin or .npy file.")
    elif not config.heldout_path:
        return open_tokens(Path(config.path), vocab_size).split(config.heldout_fraction)
    else:
        paths = (Path(config.path), Path(config.heldout_path))
    train, heldout = (open_tokens(path, vocab_size) for path in paths)
    return train, heldout
