"""Open the training and held-out samples that the `[data]` table of a configuration names."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Literal, NamedTuple

from jaxpipe.config import ConfigError, DataConfig, SourceConfig
from jaxpipe.config.paths import is_address
from jaxpipe.data.balance import BalancedOrder
from jaxpipe.data.batches import DataSplit, SourceSamples, heldout_order, training_order
from jaxpipe.data.corpus import open_corpus_documents
from jaxpipe.data.packing import pack_documents
from jaxpipe.data.pairs import OF_PAIR, PairOrder, PairSamples
from jaxpipe.data.samples import (
    DummySamples,
    JoinedSamples,
    PackedSamples,
    StreamSamples,
    TokenSamples,
)
from jaxpipe.data.shards.documents import ShardedDocuments
from jaxpipe.data.shards.token_files import check_tokenizers, open_documents
from jaxpipe.data.shards.tokens import BareShard, values_beside
from jaxpipe.data.source_checks import check_disjoint, check_records
from jaxpipe.runtime.storage.files import local_copy

DUMMY_SAMPLES = 1 << 20


@dataclass(frozen=True)
class SplitPart:
    """One source's contribution to a split."""

    samples: TokenSamples
    fingerprint: str
    weight: float = 1.0
    whole_fingerprint: Callable[[], str] | None = None  # see `DataSplit`
    place: str = "dummy"  # path of the source, for messages
    masked: bool = False  # see `DataSplit`
    warnings: tuple[str, ...] = ()  # see `DataSplit`


@dataclass(frozen=True)
class RunData:
    """The data of a run: endless training samples, and held-out samples in a fixed order."""

    train: DataSplit
    heldout: DataSplit


class _RowSettings(NamedTuple):
    """How rows are built: `seq_len` tokens across documents, packed documents, or answers."""

    seq_len: int
    packing: Literal["none", "sequential", "best_fit"] = "none"
    most: int = 1  # largest number of documents in a row
    seed: int = 0  # shuffles documents of equal length
    even: bool = False  # bounds the attention of a row
    answers: tuple[str, ...] = ()  # rows are the answers of pairs; what they have beside tokens

    @property
    def description(self) -> str:
        """Part of the fingerprint that identifies these settings."""
        if self.answers:
            return f" answers with {' '.join(self.answers)}"
        if self.packing == "none":
            return ""
        best_fit = self.packing == "best_fit"
        drawn = f"{' even' if self.even else ''} of {self.seed}" if best_fit else ""
        return f" packing={self.packing}{drawn} max_documents={self.most}"


def open_data(
    config: DataConfig, *, seq_len: int, vocab_size: int, seed: int, directory: Path,
    variable_length: bool = False, answers: tuple[str, ...] = (),
) -> RunData:  # fmt: skip
    """Open the sources that a configuration names.

    No token is in both splits: the held-out split is the last `heldout_fraction` of the tokens of
    each source, or comes from `heldout_path`. Held-out documents are packed in order, so that the
    first samples contain the first documents.

    Args:
      config: the `[data]` table.
      seq_len: tokens of a row.
      vocab_size: ids must be below it.
      seed: >= 0; determines the order (and the tokens of `dummy`).
      directory: where the corpus of `stdlib` is stored.
      variable_length: without packing, give every row one document.
      answers: give every row one answer of a pair, with these float32 values beside its tokens;
        empty: the documents are no pairs.

    Raises `ConfigError` for every fault that shows without reading all tokens: a file missing,
    empty, truncated or of another kind, too few tokens for one sample, ids outside the vocabulary.
    """
    of_train = of_heldout = _RowSettings(seq_len)
    if answers:
        of_train = of_heldout = _RowSettings(seq_len, answers=answers)
    elif config.packing != "none":
        even = config.balance_rows > 1
        of_train = _RowSettings(seq_len, config.packing, config.max_documents, seed, even)
        of_heldout = of_train._replace(packing="sequential")
    elif variable_length:
        of_train = of_heldout = _RowSettings(seq_len, "sequential")
    if config.source == "dummy":
        if of_train.packing != "none":
            asked = "data.packing" if config.documents else "train.variable_length"
            raise ConfigError(
                f"{asked} makes rows of whole documents, but data.source='dummy' has none: choose "
                f"another source, or leave {asked} out."
            )
        train, heldout = _build_dummy_parts(config, seq_len, vocab_size, seed)
    else:
        together = OF_PAIR if answers else 1
        to_train_on, held_out = _open_sources(config, vocab_size, directory, together)
        # Held-out documents first: their few temporary arrays are freed before the larger ones.
        heldout = [_build_part(config, of_heldout, *of) for of in held_out]
        train = [_build_part(config, of_train, *of) for of in to_train_on]
    order_seed = seed if config.shuffle else None
    sizes, block = f"seq_len={seq_len} shuffle={order_seed}", config.balance_rows
    sizes += f" blocks_of_distinct_rows={block}" if block > 1 else ""
    split = _build_split("training", train, sizes, order_seed)
    return RunData(
        train=_balance_split(split, block, seed) if block > 1 else split,
        heldout=_build_split("held-out", heldout, f"seq_len={seq_len}"),
    )


def _build_split(
    name: str, parts: Sequence[SplitPart], sizes: str, seed: int | None = None
) -> DataSplit:
    """Build a split: endless if it is named training, and shuffled if there is a seed."""
    lengths, weights = [len(part.samples) for part in parts], [part.weight for part in parts]
    if in_pairs := isinstance(parts[0].samples, PairSamples):
        lengths = [length // OF_PAIR for length in lengths]
    training = name == "training"
    order = training_order(lengths, weights, seed) if training else heldout_order(lengths, weights)
    order = PairOrder(order) if in_pairs else order
    sources = tuple(
        SourceSamples(part.place, len(part.samples), part.weight / sum(weights)) for part in parts
    )
    shares = [f"{part.weight / sum(weights):.6g} of {part.fingerprint}" for part in parts]
    split = DataSplit(
        name, f"{' + '.join(shares)} {sizes}", JoinedSamples([part.samples for part in parts]),
        order, sources=sources, masked=any(part.masked for part in parts),
        warnings=tuple(warning for part in parts for warning in part.warnings),
    )  # fmt: skip
    if len(parts) > 1:
        return split
    part, whole = parts[0], parts[0].whole_fingerprint
    whole_content = whole and (lambda: f"{whole()} {sizes}")
    content = f"{part.fingerprint} {sizes}"
    return replace(split, content=content, samples=part.samples, whole_content=whole_content)


def _balance_split(split: DataSplit, size: int, seed: int) -> DataSplit:
    """Bring rows of equal attention together, `size` at a time."""
    epoch = min(int(source.samples / source.share) for source in split.sources)
    order = BalancedOrder(split.order, split.samples.documents_of, size, epoch, seed)
    return replace(split, order=order)


def _build_dummy_parts(
    config: DataConfig, seq_len: int, vocab_size: int, seed: int
) -> tuple[list[SplitPart], list[SplitPart]]:
    cut = DUMMY_SAMPLES - round(config.heldout_fraction * DUMMY_SAMPLES)
    train, heldout = (
        [
            SplitPart(
                DummySamples(seed, vocab_size, seq_len, part), f"dummy {seed=} {vocab_size=} {part}"
            )
        ]
        for part in (range(cut), range(cut, DUMMY_SAMPLES))
    )
    return train, heldout


def _build_part(
    config: DataConfig, rows: _RowSettings, documents: ShardedDocuments, weight: float
) -> SplitPart:
    """Build the samples of a source's documents."""
    name = "file" if config.sources else config.source
    masked = any(shard.masked for shard in documents.shards)
    part = partial(SplitPart, weight=weight, place=documents.place, masked=masked)
    fingerprint = f"{name} {documents.fingerprint}{rows.description}"
    if rows.answers:
        pairs, values, warnings = _build_pairs(documents, rows)
        return part(pairs, f"{fingerprint} {values}", warnings=warnings)
    if rows.packing != "none":
        samples = _pack_documents(documents, rows, rows.packing, shared=config.packing != "none")
        return part(samples, f"{fingerprint}{' worst_fit' if samples.packing.worst_fit else ''}")
    whole = documents.whole_fingerprint
    whole_fingerprint = whole and (lambda: f"{name} {whole()}")
    return part(
        StreamSamples(documents, rows.seq_len), fingerprint, whole_fingerprint=whole_fingerprint
    )


def _build_pairs(
    documents: ShardedDocuments, rows: _RowSettings
) -> tuple[PairSamples, str, tuple[str, ...]]:
    """Build the rows of a prepared folder of pairs, a digest of their values, and warnings.

    Raises `ConfigError` where a shard has no values beside its tokens, or of another number.
    """
    digests = []
    for shard in documents.shards:
        for beside in (values_beside(shard, name) for name in rows.answers):
            size = beside.path.stat().st_size if beside.path.exists() else 0
            if size != beside.size * beside.dtype.itemsize:
                raise ConfigError(
                    f"{beside.path} {'has another size than its tokens' if size else 'is missing'}:"
                    f" write it by `python -m jaxpipe.score MODEL {shard.path.parent}` with the "
                    f"model that the run starts from."
                )
            digests.append(beside.sampled_digest())
    samples = PairSamples(documents, rows.seq_len, rows.answers)
    warnings: tuple[str, ...] = ()
    if samples.left_out:
        warnings = (
            f"warning: {samples.left_out} pairs of {documents.place} have an answer longer than "
            f"train.seq_len + 1 = {rows.seq_len + 1} tokens, or of one token, and are left out",
        )
    values = blake2b(" ".join(digests).encode(), digest_size=8).hexdigest()
    return samples, values, warnings


def _pack_documents(
    documents: ShardedDocuments,
    rows: _RowSettings,
    how: Literal["sequential", "best_fit"],
    *,
    shared: bool,
) -> PackedSamples:
    """Pack documents into rows.

    Raises `ConfigError` where a file has no document boundaries, or no document has two tokens.
    """
    asked = "data.packing" if shared else "train.variable_length"
    for shard in documents.shards:
        if isinstance(shard, BareShard) and shard.ends is None:
            raise ConfigError(
                f"{asked} makes rows of whole documents, but {shard.path} is one row of tokens "
                f"without borders: prepare it with documents, or leave {asked} out."
            )
    packing = pack_documents(
        documents.lengths, rows.seq_len, how,
        most=rows.most, seed=rows.seed, even=rows.even,
    )  # fmt: skip
    if not len(packing):
        raise ConfigError(
            f"{asked} makes rows of whole documents, but none in {documents.place} has two tokens, "
            f"an input and its target: use other data."
        )
    return PackedSamples(documents, packing, shared)


Weighted = tuple[ShardedDocuments, float]


def fetch_data(config: DataConfig) -> None:
    """Copy data at addresses to this machine, before one process after the other opens them."""
    for path in [config.path, *(one.path for one in config.sources), config.heldout_path]:
        if is_address(path):
            local_copy(path)


def _open_sources(
    config: DataConfig, vocab_size: int, directory: Path, together: int
) -> tuple[list[Weighted], list[Weighted]]:
    """Open the documents of every source to train on, and the held-out documents.

    `together` consecutive documents are a pair, or 1.
    """
    if config.source == "stdlib" and not config.sources:
        if vocab_size < 256:
            raise ConfigError(
                f"data.source = 'stdlib' is bytes, 0..255, but model.vocab_size={vocab_size}: use "
                f"model.vocab_size=256 or more."
            )
        one, other = open_corpus_documents(directory, config.heldout_fraction, vocab_size)
        return [(one, 1.0)], [(other, 1.0)]
    sources = config.sources or (SourceConfig(path=config.path),)
    for path in [*(one.path for one in sources if one.weight), config.heldout_path]:
        if path:
            check_records(path, in_pairs=together > 1)
    ignored = frozenset(config.ignore_columns)
    opened = [
        (open_documents(source.path, vocab_size, ignored), source.weight)
        for source in sources
        if source.weight
    ]
    heldout = config.heldout_path
    apart = [(open_documents(heldout, vocab_size, ignored), 1.0)] if heldout else []
    known = [documents for documents, _ in (*opened, *apart) if documents.tokenizer]
    check_tokenizers({documents.tokenizer: documents.place for documents in known})
    check_disjoint([documents for documents, _ in opened], [documents for documents, _ in apart])
    if apart:
        return opened, apart
    fraction = config.heldout_fraction
    cut = [(documents.split(fraction, together), weight) for documents, weight in opened]
    return [(train, w) for (train, _), w in cut], [(rest, w) for (_, rest), w in cut]
