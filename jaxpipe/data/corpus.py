"""A corpus that needs no download: the sources of Python's standard library, one token per byte.

Every source file goes to either `train.npy` or `heldout.npy`, so no text is in both. The two arrays
are written once into a directory of the run, so a run that resumes under another Python version
reads the same text. `corpus.json` records their digests: arrays that are missing, incomplete or
changed do not match and are written again.
"""

import hashlib
import platform
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from jaxpipe.config import ConfigError
from jaxpipe.data.shards.documents import ShardedDocuments
from jaxpipe.data.shards.tokens import open_tokens
from jaxpipe.runtime.storage.writing import replace_atomically

STDLIB = Path(sysconfig.get_path("stdlib"))
PARTS = ("train.npy", "heldout.npy")
MANIFEST = "corpus.json"

_SKIPPED = frozenset({"encodings", "idlelib", "lib2to3", "pydoc_data", "turtledemo"})
_TESTS = frozenset({"test", "tests"})


class CorpusManifest(msgspec.Struct, frozen=True):
    """Content of `corpus.json`: how the corpus was split, and a digest of each array."""

    python: str  # Python version of the sources
    heldout_fraction: float
    digests: dict[str, str]  # by name of the array file
    documents: dict[str, list[int]]  # by array file: bytes of each source file in it, in order


def prepare_stdlib_corpus(
    directory: Path, heldout_fraction: float, library: Path = STDLIB
) -> tuple[Path, Path]:
    """Return the paths of the training and held-out arrays (uint8), and write them if needed.

    Several processes may write at the same time.

    Args:
      directory: where the arrays are stored.
      heldout_fraction: share of all bytes to hold out; complete source files are held out, in the
        order of a hash of their path, until the share is reached.
      library: root of the sources.

    Raises `ConfigError` where `library` has no sources or `directory` cannot be written.
    """
    train, heldout = (directory / part for part in PARTS)
    if not _is_intact(directory, heldout_fraction):
        texts = _read_sources(library)
        chosen = _choose_heldout(
            {name: len(text) for name, text in texts.items()}, heldout_fraction
        )
        parts = {
            part: [texts[name] for name in sorted(names)]
            for part, names in zip(PARTS, (texts.keys() - chosen, chosen))
        }
        lengths = {part: list(map(len, filter(None, parts[part]))) for part in PARTS}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for part in PARTS:
                with replace_atomically(directory / part) as file:
                    np.save(file, np.frombuffer(b"".join(parts[part]), np.uint8))
            digests = {part: _compute_digest(directory / part) for part in PARTS}
            manifest = CorpusManifest(platform.python_version(), heldout_fraction, digests, lengths)
            with replace_atomically(directory / MANIFEST) as file:
                file.write(msgspec.json.encode(manifest))
        except OSError as error:
            raise ConfigError(
                f"the text of data.source = 'stdlib' cannot be written to {directory}: "
                f"{error.strerror}; choose a run.dir that can be written."
            ) from error
    return train, heldout


def open_corpus_documents(
    directory: Path, heldout_fraction: float, vocab_size: int
) -> tuple[ShardedDocuments, ShardedDocuments]:
    """Return the training and the held-out documents; each source file is one document.

    Raises `ConfigError` as `prepare_stdlib_corpus` does.
    """
    paths = prepare_stdlib_corpus(directory, heldout_fraction)
    lengths = _read_manifest(directory).documents
    train, heldout = (_open_documents(path, lengths[path.name], vocab_size) for path in paths)
    return train, heldout


def _open_documents(path: Path, lengths: list[int], vocab_size: int) -> ShardedDocuments:
    shard = replace(open_tokens(path, vocab_size, full_digest=True), ends=np.cumsum(lengths))
    return ShardedDocuments([shard], vocab_size, 0, shard.size, str(path))


def _read_manifest(directory: Path) -> CorpusManifest:
    return msgspec.json.decode((directory / MANIFEST).read_bytes(), type=CorpusManifest)


def _is_intact(directory: Path, heldout_fraction: float) -> bool:
    """Whether both arrays exist, match their digests and were split by this fraction."""
    try:
        manifest = _read_manifest(directory)
        digests = {part: _compute_digest(directory / part) for part in PARTS}
    except (OSError, msgspec.DecodeError, RecursionError):
        return False
    return (manifest.heldout_fraction, manifest.digests) == (heldout_fraction, digests)


def _read_sources(library: Path) -> dict[str, bytes]:
    """Return the bytes of each `.py` file by its path, without tests and generated tables."""
    texts = {
        path.relative_to(library).as_posix(): path.read_bytes()
        for module in sys.stdlib_module_names - _SKIPPED
        for pattern in (f"{module}.py", f"{module}/**/*.py")
        for path in library.glob(pattern)
        if _TESTS.isdisjoint(path.relative_to(library).parts)
    }
    if not texts:
        raise ConfigError(
            f"data.source = 'stdlib' reads the .py sources of Python's standard library, but there "
            f"are none in {library}: install them, or set data.source to 'file' or 'dummy'."
        )
    return texts


def _choose_heldout(sizes: dict[str, int], heldout_fraction: float) -> set[str]:
    """Choose files in the order of their path's hash until they reach the share of the bytes."""
    wanted = heldout_fraction * sum(sizes.values())
    chosen: set[str] = set()
    for name in sorted(sizes, key=lambda name: hashlib.blake2b(name.encode()).digest()):
        if wanted <= 0:
            break
        chosen.add(name)
        wanted -= sizes[name]
    return chosen


def _compute_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]
