"""Convert text to token ids with Hugging Face's `tokenizers`, or with one token per byte."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from jaxpipe.config import ConfigError, first_line
from jaxpipe.data.optional import import_optional
from jaxpipe.data.prepare.records import MARKS, Passages
from jaxpipe.data.prepare.spans import byte_widths, loss_mask_by_bytes, loss_mask_by_offsets
from jaxpipe.data.shards.manifest import TokenizerEntry
from jaxpipe.tokenizer.classes import check_fields
from jaxpipe.tokenizer.files import BYTES, CONFIG, TOKENIZER, TokenizerFiles
from jaxpipe.tokenizer.tokens import read_tokens

_EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")


class Tokenizer(Protocol):
    """Converts text to ids and back."""

    @property
    def vocab_size(self) -> int:
        """The largest id plus one."""

    @property
    def prefix(self) -> tuple[int, ...]:
        """Ids that it puts before a text by itself."""

    def encode(self, documents: Sequence[Passages]) -> list["EncodedDocument"]:
        """Encode each document, without special tokens at its start or end.

        All passages of a document are encoded as one text. A token counts if any of its characters
        does, even where the token starts in a passage that does not count.
        """

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of ids `[tokens]`."""

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its name, or None if there is no such token."""

    def mark_of(self, number: int) -> str:
        """Return the text of a special token, or "" for other ids."""


class EncodedDocument(NamedTuple):
    """The tokens of a document."""

    ids: np.ndarray  # integers [tokens]
    counted: np.ndarray  # bool [tokens]: whether a token counts in the loss as a target


@dataclass(frozen=True)
class ByteTokenizer:
    """One token per byte of UTF-8; NUL, which text does not contain, is the eos."""

    vocab_size: int = 256
    prefix: tuple[int, ...] = ()

    def encode(self, documents: Sequence[Passages]) -> list[EncodedDocument]:
        """Encode each document as bytes, which count in the loss if their passage does."""
        return list(map(self._encoded, documents))

    def _encoded(self, passages: Passages) -> EncodedDocument:
        parts = [text.encode() for text, _ in passages]
        counted = np.array([counted for _, counted in passages], bool)
        ids = np.frombuffer(b"".join(parts), np.uint8)
        return EncodedDocument(ids, np.repeat(counted, list(map(len, parts))))

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of bytes `[tokens]`."""
        return ids.astype(np.uint8).tobytes().decode(errors="replace")

    def id_of(self, token: str) -> int | None:
        """Return the byte of a single ASCII character, or None."""
        return ord(token) if len(token) == 1 and ord(token) < 128 else None

    def mark_of(self, number: int) -> str:
        """Return "", because no byte is a special token."""
        return ""


@dataclass(frozen=True)
class FileTokenizer:
    """A `tokenizers.Tokenizer` from a file, and the special ids that the file puts before texts."""

    tokenizer: Any
    prefix: tuple[int, ...] = ()

    @property
    def vocab_size(self) -> int:
        """The largest id plus one, added tokens included."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, documents: Sequence[Passages]) -> list[EncodedDocument]:
        """Encode each document, without the tokenizer's special tokens at its start or end."""
        texts = ["".join(text for text, _ in passages) for passages in documents]
        kinds = [{counted for _, counted in passages} for passages in documents]
        mixed = {number for number, counts in enumerate(kinds) if len(counts) > 1}
        widths = self._widths if mixed else None
        unsure = mixed if widths is None else set()
        sure = [number for number in range(len(texts)) if number not in unsure]
        encoded: dict[int, EncodedDocument] = {}
        for number, ids in zip(sure, self._ids([texts[number] for number in sure])):
            counted: np.ndarray | None = np.full(len(ids), True in kinds[number])
            if number in mixed and widths is not None:
                counted = loss_mask_by_bytes(ids, widths, documents[number])
            if counted is not None:
                encoded[number] = EncodedDocument(ids, counted)
        numbers = [number for number in range(len(texts)) if number not in encoded]
        places = self.tokenizer.encode_batch([texts[n] for n in numbers], add_special_tokens=False)
        for number, encoding in zip(numbers, places):
            counted = loss_mask_by_offsets(encoding, documents[number])
            encoded[number] = EncodedDocument(np.array(encoding.ids, np.int32), counted)
        return [encoded[number] for number in range(len(texts))]

    def _ids(self, texts: list[str]) -> Iterator[np.ndarray]:
        encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return (np.array(encoding.ids, np.int32) for encoding in encoded)

    @cached_property
    def _widths(self) -> np.ndarray | None:
        return byte_widths(self.tokenizer)

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of ids `[tokens]`."""
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its name, or None if there is no such token."""
        return self.tokenizer.token_to_id(token)

    def mark_of(self, number: int) -> str:
        """Return the text of a special token, or "" for other ids."""
        token = self.tokenizer.get_added_tokens_decoder().get(number)
        return token.content if token is not None and token.special else ""


def load_tokenizer(name: str | TokenizerFiles) -> Tokenizer:
    """Load a tokenizer: `bytes`, a `tokenizer.json`, its directory, or the files of one.

    Raises `ConfigError` where they cannot be read, or `tokenizers` is not installed.
    """
    files = TokenizerFiles.read(name)
    if files.is_bytes:
        return ByteTokenizer()
    tokenizer = read_tokenizer(files)
    example = tokenizer.encode("a")
    special = zip(example.ids, example.special_tokens_mask)
    prefix = tuple(number for number, _ in takewhile(itemgetter(1), special))
    # Special tokens are not added, and some post-processors trim blanks from tokens' spans.
    tokenizer.post_processor = import_optional("tokenizers.processors", "a tokenizer").Sequence([])
    return FileTokenizer(tokenizer, prefix)


def read_tokenizer(files: TokenizerFiles) -> Any:
    """Return a `tokenizers.Tokenizer` whose ids are those of transformers' `AutoTokenizer`.

    Raises `ConfigError` where the files cannot be read, disagree or have a setting that is not
    understood, or `tokenizers` is not installed.
    """
    library = import_optional("tokenizers", f"the tokenizer {files.place}")
    if TOKENIZER not in files.contents:
        raise ConfigError(
            f"{files.place} has no {TOKENIZER}: give one, a model's directory with one, or 'bytes'."
        )
    check_fields(files)
    tokens = read_tokens(files)
    try:
        tokenizer = library.Tokenizer.from_buffer(files.contents[TOKENIZER])
        tokenizer.add_tokens([library.AddedToken(**token) for token in tokens.added])
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(
            f"{TOKENIZER} of {files.place} is no tokenizer that this version of tokenizers reads "
            f"({first_line(error)}): give another."
        ) from error
    tokenizer.encode_special_tokens = bool(files.json(CONFIG).get("split_special_tokens"))
    tokenizer.no_truncation()  # some files set truncation and padding to a fixed length
    tokenizer.no_padding()
    return tokenizer


def describe_tokenizer(
    files: TokenizerFiles, tokenizer: Tokenizer, eod: str, bos: str
) -> TokenizerEntry:
    """Return the manifest's entry of a tokenizer.

    `eod` is the id or the name of the token that ends a document, `none` for no such token, or
    empty for the eos in the tokenizer's files, else the first known token of `_EOS_NAMES`.
    `bos` is the token that starts one, in the same way; empty for the tokenizer's own `prefix`.

    Raises `ConfigError` where there is no such token.
    """
    if files.is_bytes:
        digest, ending = BYTES, [eod or "\0"]
    else:
        tokens = read_tokens(files)
        state = hashlib.blake2b(files.contents[TOKENIZER], digest_size=16)
        if tokens.added:
            state.update(msgspec.json.encode(tokens.added))
        named = eod or tokens.named.get("eos_token")
        digest, ending = state.hexdigest(), [named] if named else list(_EOS_NAMES)

    def find(option: str, names: Sequence[str], what: str) -> int:
        numbers = (_id_of(tokenizer, one) for one in names)
        number = next((number for number in numbers if number is not None), None)
        if number is None:
            raise ConfigError(
                f"the tokenizer {files.place} of {tokenizer.vocab_size} ids has no token {what}: "
                f"give {option} one of its tokens or ids, or none."
            )
        return number

    return TokenizerEntry(
        Path(files.place).name, digest, tokenizer.vocab_size,
        None if eod == "none" else find("--eod", ending, eod or "that is known to end text"),
        tokenizer.prefix if not bos else () if bos == "none" else (find("--bos", [bos], bos),),
    )  # fmt: skip


def _id_of(tokenizer: Tokenizer, token: str) -> int | None:
    """Return the id of a token by its name or its number, or None if there is no such token."""
    number = tokenizer.id_of(token)
    if number is None and token.isdecimal() and int(token) < tokenizer.vocab_size:
        number = int(token)
    return number


def describe_chat_fault(files: TokenizerFiles, tokenizer: Tokenizer) -> str:
    """Return why a tokenizer cannot encode ChatML, as the end of an error message, or ""."""
    if files.is_bytes:
        return ""  # the marks are encoded as bytes like other text
    for mark in MARKS:
        number = tokenizer.id_of(mark)
        if number is None or number not in tokenizer.encode([[(mark, True)]])[0].ids:
            return (
                f"has messages, which are written in ChatML, but the tokenizer {files.place} has "
                f"no token {mark}: give one that has it, or write prompt and completion."
            )
    return ""
