"""Text to token ids: Hugging Face's `tokenizers`, or the bytes of the text themselves."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from jaxpipe.config import ConfigError, first_line
from jaxpipe.data.manifest import TokenizerEntry
from jaxpipe.data.optional import needed

BYTES = "bytes"
TOKENIZER = "tokenizer.json"
_EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")


class Tokenizer(Protocol):
    """What turns text into ids."""

    vocab_size: int

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, integers `[tokens]`, without ids of its beginning or end."""

    def decode(self, ids: np.ndarray) -> str:
        """The text of ids `[tokens]`."""

    def id_of(self, token: str) -> int | None:
        """The id of a token by its name, if it is one."""


@dataclass(frozen=True)
class Bytes:
    """A token for every byte of UTF-8; NUL, which text has not, ends a document."""

    vocab_size: int = 256

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Bytes of each text."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: np.ndarray) -> str:
        """The text of bytes `[tokens]`."""
        return ids.astype(np.uint8).tobytes().decode(errors="replace")

    def id_of(self, token: str) -> int | None:
        """The byte of a text of one."""
        return ord(token) if len(token) == 1 and ord(token) < 128 else None


@dataclass(frozen=True)
class FromFile:
    """A `tokenizers.Tokenizer`."""

    tokenizer: Any

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, without those that the tokenizer would put before or behind it."""
        encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encoded]

    def decode(self, ids: np.ndarray) -> str:
        """The text of ids `[tokens]`."""
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def id_of(self, token: str) -> int | None:
        """The id of a token by its name, if it is one."""
        return self.tokenizer.token_to_id(token)


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


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    """What `tokenizer_config.json` says, if it is there."""
    path = folder / "tokenizer_config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON ({error}): correct it.") from error
