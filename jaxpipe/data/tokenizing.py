"""Text to token ids: Hugging Face's `tokenizers`, or the bytes of the text themselves."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from jaxpipe.config import ConfigError, first_line
from jaxpipe.data.manifest import TokenizerEntry
from jaxpipe.data.optional import needed
from jaxpipe.data.records import MARKS, Passages
from jaxpipe.data.spans import byte_widths, counted_by_bytes, counted_by_places

BYTES = "bytes"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")


class Tokenizer(Protocol):
    """What turns text into ids."""

    vocab_size: int

    def encode(self, documents: Sequence[Passages]) -> list["Encoded"]:
        """Ids of the text of each document, without ids of its beginning or end.

        All passages are encoded as one text. A token counts if one of its characters does, also
        where it begins in a passage that does not count.
        """

    def decode(self, ids: np.ndarray) -> str:
        """The text of ids `[tokens]`."""

    def id_of(self, token: str) -> int | None:
        """The id of a token by its name, if it is one."""

    def mark_of(self, number: int) -> str:
        """The text that is always the token of an id, if that is a special one; else nothing."""


class Encoded(NamedTuple):
    """The tokens of a document."""

    ids: np.ndarray  # integers [tokens]
    counted: np.ndarray  # bool [tokens]: whether a token counts in the loss as a target


@dataclass(frozen=True)
class Bytes:
    """A token for every byte of UTF-8; NUL, which text has not, ends a document."""

    vocab_size: int = 256

    def encode(self, documents: Sequence[Passages]) -> list[Encoded]:
        """Bytes of each document, which count as their passage does."""
        return list(map(self._encoded, documents))

    def _encoded(self, passages: Passages) -> Encoded:
        parts = [text.encode() for text, _ in passages]
        counted = np.array([counted for _, counted in passages], bool)
        ids = np.frombuffer(b"".join(parts), np.uint8)
        return Encoded(ids, np.repeat(counted, list(map(len, parts))))

    def decode(self, ids: np.ndarray) -> str:
        """The text of bytes `[tokens]`."""
        return ids.astype(np.uint8).tobytes().decode(errors="replace")

    def id_of(self, token: str) -> int | None:
        """The byte of a text of one."""
        return ord(token) if len(token) == 1 and ord(token) < 128 else None

    def mark_of(self, number: int) -> str:
        """Nothing: a byte may always be of text."""
        return ""


@dataclass(frozen=True)
class FromFile:
    """A `tokenizers.Tokenizer`."""

    tokenizer: Any

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, documents: Sequence[Passages]) -> list[Encoded]:
        """Ids of each document, without those that the tokenizer would put before or behind it."""
        texts = ["".join(text for text, _ in passages) for passages in documents]
        kinds = [{counted for _, counted in passages} for passages in documents]
        unsure = {n for n, counts in enumerate(kinds) if len(counts) > 1 and self._widths is None}
        sure = [number for number in range(len(texts)) if number not in unsure]
        encoded: dict[int, Encoded] = {}
        for number, ids in zip(sure, self._ids([texts[number] for number in sure])):
            if len(kinds[number]) > 1:
                counted = counted_by_bytes(ids, self._widths, documents[number])
            else:
                counted = np.full(len(ids), True in kinds[number])
            encoded[number] = Encoded(ids, counted)
        unsure |= {number for number, one in encoded.items() if one.counted is None}
        rest = sorted(unsure)
        places = self.tokenizer.encode_batch([texts[n] for n in rest], add_special_tokens=False)
        for number, encoding in zip(rest, places):
            counted = counted_by_places(encoding, documents[number])
            encoded[number] = Encoded(np.array(encoding.ids, np.int32), counted)
        return [encoded[number] for number in range(len(texts))]

    def _ids(self, texts: list[str]) -> Iterator[np.ndarray]:
        encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return (np.array(encoding.ids, np.int32) for encoding in encoded)

    @cached_property
    def _widths(self) -> np.ndarray | None:
        return byte_widths(self.tokenizer)

    def decode(self, ids: np.ndarray) -> str:
        """The text of ids `[tokens]`."""
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def id_of(self, token: str) -> int | None:
        """The id of a token by its name, if it is one."""
        return self.tokenizer.token_to_id(token)

    def mark_of(self, number: int) -> str:
        """The text of a special token."""
        token = self.tokenizer.get_added_tokens_decoder().get(number)
        return token.content if token is not None and token.special else ""


def tokenizer_file(path: Path) -> Path:
    """The `tokenizer.json` that a path means: itself, or the one in a model's directory.

    Raises `ConfigError` where there is none.
    """
    file = path / TOKENIZER if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"{file} does not exist: give a {TOKENIZER}, a model's directory with one, or 'bytes'."
        )
    return file


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a name: `bytes`, or the path of a `tokenizer.json` or a model's directory.

    Raises `ConfigError` where it cannot be read, or `tokenizers` is not installed.
    """
    if name == BYTES:
        return Bytes()
    file = tokenizer_file(Path(name))
    library = needed("tokenizers", f"the tokenizer {file}")
    try:
        tokenizer = library.Tokenizer.from_file(str(file))
        tokenizer.no_truncation()  # some files ask for one length of all texts
        tokenizer.no_padding()
        # No tokens are to be added, and what adds them may cut blanks off the spans of others.
        tokenizer.post_processor = library.processors.Sequence([])
        return FromFile(tokenizer)
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(
            f"{file} is no tokenizer that this version of tokenizers reads ({first_line(error)}): "
            f"give another."
        ) from error


def describe(name: str, tokenizer: Tokenizer, eod: str) -> TokenizerEntry:
    """What the manifest says of a tokenizer.

    `eod` is the id or the name of the token that ends a document, `none` for no such token, or
    empty for the tokenizer's own: that of `tokenizer_config.json`, else of a usual name.

    Raises `ConfigError` where there is no such token.
    """
    if name == BYTES:
        digest, known = BYTES, {"eos_token": "\0"}
    else:
        file = tokenizer_file(Path(name))
        digest = hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
        known = _tokenizer_config(file.parent)
    entry = TokenizerEntry(Path(name).name, digest, tokenizer.vocab_size, None)
    if eod == "none":
        return entry
    if eod.isdecimal() and tokenizer.id_of(eod) is None:
        number = int(eod)
    else:
        named = known.get("eos_token")
        named = named.get("content") if isinstance(named, dict) else named
        names = [eod] if eod else [named] if named else _EOS_NAMES
        number = next((n for one in names if (n := tokenizer.id_of(one)) is not None), None)
    if number is None or number >= tokenizer.vocab_size:
        raise ConfigError(
            f"the tokenizer {name} of {tokenizer.vocab_size} ids has no token "
            f"{eod or 'that is known to end text'}: give --eod one of its tokens or ids, or none."
        )
    return msgspec.structs.replace(entry, eod=number)


def chat_fault(name: str, tokenizer: Tokenizer) -> str:
    """Why a tokenizer cannot write ChatML, to stand behind the place of messages; or nothing."""
    if name == BYTES:
        return ""  # its tokens are bytes, also of the marks
    for mark in MARKS:
        number = tokenizer.id_of(mark)
        if number is None or number not in tokenizer.encode([[(mark, True)]])[0].ids:
            return (
                f"has messages, which are written in ChatML, but the tokenizer {name} has no token "
                f"{mark}: give one that has it, or write prompt and completion."
            )
    return ""


def template_of(name: str) -> Path | None:
    """The file with the chat template of a tokenizer, if it has one."""
    if name == BYTES:
        return None
    folder = tokenizer_file(Path(name)).parent
    for file in (folder / "chat_template.jinja", folder / "chat_template.json"):
        if file.exists():
            return file
    config = _tokenizer_config(folder)
    return folder / TOKENIZER_CONFIG if config.get("chat_template") else None


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    """What the tokenizer's other file says, if it is there."""
    path = folder / TOKENIZER_CONFIG
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON ({error}): correct it.") from error
