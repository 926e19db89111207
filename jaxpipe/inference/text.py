"""Text of a trained model: its tokenizer, and the tokens that end a text."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from jaxpipe.config import ConfigError
from jaxpipe.data.prepare.chat_templates import load_chat_template
from jaxpipe.data.prepare.records import ChatMessage
from jaxpipe.data.prepare.tokenizing import ByteTokenizer, read_tokenizer
from jaxpipe.inference.saved_model import SavedModel
from jaxpipe.tokenizer.files import TOKENIZER


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


def with_tokenizer(saved: SavedModel, given: str) -> SavedModel:
    """A model with another tokenizer, and what that knows of special tokens and conversations.

    `given` is "bytes", or the path of a tokenizer.json or its directory; "" is the model's own.
    Raises `ConfigError` where it is none, or none of this model.
    """
    if not given:
        return saved
    serving = saved.serving.with_tokenizer(given, saved.model.vocab_size)
    return replace(saved, serving=serving)


def tokenizer_of(saved: SavedModel) -> TextTokenizer:
    """The tokenizer of a model. Raises `ConfigError` where it has none, or it cannot be read."""
    files = replace(saved.serving.tokenizer, place=str(saved.place))
    if files.is_bytes:
        return ByteText()
    if TOKENIZER in files.contents:
        return FileText(read_tokenizer(files))
    raise ConfigError(
        f"{saved.place} has no {TOKENIZER}: give --tokenizer the path of one, or 'bytes'."
    )


def chat_prompt(saved: SavedModel, message: str) -> str:
    """Return a user's message as the chat template writes it, up to where the reply begins.

    `message` is the first of a conversation. Raises `ConfigError` where the model has no template,
    or it refuses such a conversation.
    """
    files = replace(saved.serving.tokenizer, place=str(saved.place))
    if not files.chat_templates:
        raise ConfigError(
            f"{saved.place} has no chat template: give --tokenizer a directory that has one, or "
            f"leave out --chat."
        )
    template = load_chat_template(files)
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
