"""Text of a trained model: its tokenizer, and the tokens that end a text."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxpipe.checkpoint.serving import TOKENIZER
from jaxpipe.config import Config, ConfigError
from jaxpipe.data.chat_templates import find_chat_template, load_chat_template
from jaxpipe.data.manifest import read_manifest
from jaxpipe.data.records import ChatMessage
from jaxpipe.data.token_files import find_prepared_folders
from jaxpipe.data.tokenizing import BYTES, ByteTokenizer, read_tokenizer, tokenizer_file
from jaxpipe.inference.saved_model import SavedModel


class TextTokenizer(Protocol):
    """Converts a text to token ids and back; `special` says whether to add, or keep, marks."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the ids of a text, with the special tokens that the tokenizer puts around it."""

    def decode(self, ids: list[int], *, special: bool = False) -> str:
        """Return the text of ids."""


class ByteText:
    """One token per byte of UTF-8, without special tokens."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def decode(self, ids: list[int], *, special: bool = False) -> str:
        """Return the text of bytes."""
        return ByteTokenizer().decode(np.array(ids))


@dataclass(frozen=True)
class FileText:
    """A `tokenizers.Tokenizer`."""

    tokenizer: Any

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the ids of a text, with the special tokens that the tokenizer puts around it."""
        return self.tokenizer.encode(text, add_special_tokens=special).ids

    def decode(self, ids: list[int], *, special: bool = False) -> str:
        """Return the text of ids."""
        return self.tokenizer.decode(ids, skip_special_tokens=not special)


def tokenizer_of(saved: SavedModel, given: str = "") -> TextTokenizer:
    """The tokenizer of a model.

    Args:
      saved: the model.
      given: "bytes", or the path of a tokenizer.json or its directory; "": the model's own.

    Raises `ConfigError` where the model has none, or it cannot be read.
    """
    if given == BYTES or (not given and saved.trained_by and _is_of_bytes(saved.trained_by)):
        return ByteText()
    if given:
        return FileText(read_tokenizer(str(tokenizer_file(given))))
    if TOKENIZER in saved.serving.files:
        content = saved.serving.files[TOKENIZER]
        return FileText(read_tokenizer(f"{TOKENIZER} of {saved.place}", content))
    raise ConfigError(
        f"{saved.place} has no {TOKENIZER}: give --tokenizer the path of one, or 'bytes'."
    )


def _is_of_bytes(config: Config) -> bool:
    """Whether a run's data are bytes, as far as its prepared folders are still there."""
    data = config.data
    paths = [source.path for source in data.sources] or ([data.path] if data.path else [])
    if not paths:
        return data.source == "stdlib"
    try:
        folders = [folder for path in paths for folder in find_prepared_folders(path)]
    except ConfigError:
        return False
    return bool(folders) and read_manifest(folders[0]).tokenizer.name == BYTES


def chat_prompt(saved: SavedModel, given: str, message: str) -> str:
    """Return a user's message as the chat template writes it, up to where the reply begins.

    Args:
      saved: the model.
      given: the tokenizer with the template, as for `tokenizer_of`; "": the model's own.
      message: of the user, the first of a conversation.

    Raises `ConfigError` where there is no template, or it refuses such a conversation.
    """
    with tempfile.TemporaryDirectory() as folder:
        if not given:
            saved.serving.write(Path(folder))
        name = given or str(Path(folder) / TOKENIZER)
        has_tokenizer = given or TOKENIZER in saved.serving.files
        if not has_tokenizer or find_chat_template(name) is None:
            raise ConfigError(
                f"{given or saved.place} has no chat template: give --tokenizer a directory that "
                f"has one, or leave out --chat."
            )
        template = load_chat_template(name)
    try:
        return template.prompt([ChatMessage({"role": "user", "content": message}, counts=False)])
    except ValueError as error:
        raise ConfigError(f"{error}: leave out --chat.") from error


def encode_prompt(
    saved: SavedModel, tokenizer: TextTokenizer, text: str, *, special: bool = True
) -> list[int]:
    """The ids of a prompt, from which at least one token can be generated.

    `special` says whether the tokenizer's special tokens are added. Raises `ConfigError` where
    there is no token, an id is not of the model, or the prompt is longer than the model.
    """
    ids = tokenizer.encode(text, special=special)
    if not ids:
        raise ConfigError("the prompt has no token: give --prompt at least one character.")
    if max(ids) >= saved.model.vocab_size:
        raise ConfigError(
            f"the tokenizer gives the id {max(ids)}, but model.vocab_size="
            f"{saved.model.vocab_size}: give --tokenizer the one that the model was trained with."
        )
    if saved.longest and len(ids) >= saved.longest:
        raise ConfigError(
            f"the prompt has {len(ids)} tokens, but the model is made for model.max_seq_len="
            f"{saved.longest}, and the next token needs room too: shorten the prompt."
        )
    return ids
