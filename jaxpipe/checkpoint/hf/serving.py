"""Files and settings that text generation needs besides the weights.

They are the BOS, EOS and padding token ids, the longest context, the dtype, sampling defaults and
the tokenizer's files. A checkpoint keeps them in its metadata, and a run that starts from such a
checkpoint copies them into each of its own checkpoints.
"""

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import msgspec

from jaxpipe.config import ConfigError
from jaxpipe.runtime.storage.files import local_copy
from jaxpipe.tokenizer.files import (
    CONFIG,
    GENERATION,
    VOCABULARIES,
    TokenizerFiles,
    is_tokenizer_file,
)
from jaxpipe.tokenizer.tokens import read_tokens

_ROLES = ("bos", "eos", "pad")
_LARGEST = 256 << 20  # bytes of the tokenizer's files in a checkpoint's metadata

TokenId = int | list[int]


@dataclass(frozen=True)
class ServingFiles:
    """The content of a Hugging Face directory other than weights, as far as it is known.

    Attributes:
      token_ids: fields of config.json, such as `{"eos_token_id": 2}`; an id may be a list.
      max_positions: longest context [tokens]; 0: not known.
      dtype: torch's name of the dtype of the weights; "": not known.
      generation: content of generation_config.json; empty if there is none.
      files: the tokenizer's files by path within the directory.
    """

    token_ids: dict[str, TokenId] = field(default_factory=dict)
    max_positions: int = 0
    dtype: str = ""
    generation: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def tokenizer(self) -> TokenizerFiles:
        """The tokenizer's files."""
        return TokenizerFiles("the model", self.files)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens at which generation stops; empty: none is known."""
        return tuple(_eos_of(self.generation) or _eos_of(self.token_ids))

    @property
    def prefix_token_id(self) -> int | None:
        """The token before a text that has none before it; None: not known.

        It is BOS, or else EOS, of the tokenizer, or of config.json where the tokenizer has neither.
        """
        for known in (_special_token_ids(self.tokenizer), self.token_ids):
            ids = _as_list(known.get("bos_token_id")) or _as_list(known.get("eos_token_id"))
            if ids:
                return ids[0]
        return None

    @property
    def example_prompt(self) -> str:
        """Arguments of `generate` that fit the tokenizer, for messages; "" if there is none."""
        if self.tokenizer.chat_templates:
            return "--chat --prompt Hello"
        known = not {*VOCABULARIES}.isdisjoint(self.files)
        return "--prompt 'def '" if self.tokenizer.is_bytes else "--prompt 'The '" * known

    @classmethod
    def read(cls, directory: Path, config: Mapping[str, Any]) -> Self:
        """Read them from a Hugging Face directory.

        `config` is its config.json with defaults filled in.
        """
        names = (f"{role}_token_id" for role in _ROLES)
        files = TokenizerFiles.read(directory)
        return cls(
            token_ids={name: config[name] for name in names if config.get(name) is not None},
            max_positions=config.get("max_position_embeddings") or config.get("n_positions") or 0,
            dtype=config.get("dtype") or config.get("torch_dtype") or "",
            generation=files.json(GENERATION),
            files=_without_generation(files),
        )

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Self:
        """Unpack them from a checkpoint's metadata; all fields are unknown if it has none.

        Raises `ConfigError` for metadata that no checkpoint has: it may come from elsewhere.
        """
        packed = meta.get("huggingface") or {}
        try:
            found = msgspec.convert(packed, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"the checkpoint's metadata are wrong (huggingface: {error})."
            ) from error
        if unknown := packed.keys() - {one.name for one in fields(cls)}:
            raise ConfigError(f"the checkpoint's metadata have an unknown field {min(unknown)!r}.")
        files, room = {}, _LARGEST
        for name, content in found.files.items():
            if not is_tokenizer_file(name):
                raise ConfigError(
                    f"the checkpoint's metadata have a file {name!r}, which is none of a tokenizer."
                )
            files[name] = _decompress(name, content, room)
            room -= len(files[name])
        return replace(found, files=files)

    def as_meta(self) -> dict[str, Any]:
        """The metadata entry that `from_meta` reads; empty if nothing is known."""
        if self == type(self)():
            return {}
        packed = {
            name: base64.b64encode(zlib.compress(content)).decode()
            for name, content in self.files.items()
        }
        return {"huggingface": asdict(self) | {"files": packed}}

    def with_tokenizer(self, name: str | Path | TokenizerFiles, vocab_size: int) -> Self:
        """A copy with another tokenizer, and what it knows of token ids and sampling besides.

        EOS tokens are those of both. Its chat template and its sampling defaults stand before those
        that are known. `name` is that of a tokenizer as `TokenizerFiles.read` takes it. Raises
        `ConfigError` where there is no tokenizer, an id is not below `vocab_size`, or a known EOS
        token has another id.
        """
        files = TokenizerFiles.read(name)
        if not {*VOCABULARIES} & files.contents.keys():
            raise ConfigError(
                f"{files.place} holds no tokenizer ({', '.join(VOCABULARIES)}): give the directory "
                f"with the files that `save_pretrained` of a tokenizer wrote."
            )
        tokens = read_tokens(files)
        self._check_eos(tokens.ids, files)
        config = {} if files.is_bytes else _read_config(files.place)
        generation = files.json(GENERATION)
        named, of_model = _special_token_ids(files), _token_ids(config, files)
        of_generation = _token_ids(generation, files)
        for name, token in (*of_generation.items(), *(named | of_model).items()):
            if max(_as_list(token)) >= vocab_size:
                raise ConfigError(
                    f"the tokenizer in {files.place} has {name}={token}, but model.vocab_size="
                    f"{vocab_size}: give the tokenizer that the model was trained with."
                )
        ends = [*_eos_of(named), *_eos_of(of_model)]
        copy = replace(
            self,
            token_ids=self.token_ids | named | of_model,
            generation=self.generation | generation,
            files=_without_generation(files),
        )
        copy = copy._with_eos(
            [*_eos_of(self.token_ids), *ends],
            [*self.eos_token_ids, *ends, *_eos_of(of_generation)],
        )
        known = self.tokenizer.chat_templates
        return copy if not known or files.chat_templates else copy._with_templates(known)

    def with_data(
        self,
        files: TokenizerFiles,
        vocab_size: int,
        *,
        ends: Sequence[int] = (),
        starts: Sequence[int] = (),
        has_chats: bool = False,
    ) -> Self:
        """A copy that knows what a run's training data know.

        The tokenizer of the data is used where no other is known, or where it is the known one with
        further tokens.

        Args:
          files: the tokenizer of the data; no files: it is not known.
          vocab_size: of the model.
          ends: tokens that end documents or turns, which become EOS tokens.
          starts: tokens that start documents.
          has_chats: whether the data have conversations, which `files` has the template of.
        """
        copy, known = self, self.tokenizer.chat_templates
        if files.contents and self._is_extended_by(files):
            copy = self.with_tokenizer(_with_config(files, ends), vocab_size)
            known = known or files.chat_templates
        if templates := files.chat_templates if has_chats else known:
            copy = copy._with_templates(templates)
        if starts and "bos_token_id" not in copy.token_ids:
            copy = replace(copy, token_ids=copy.token_ids | {"bos_token_id": starts[0]})
        return copy._with_eos([*_eos_of(copy.token_ids), *ends], [*copy.eos_token_ids, *ends])

    def _is_extended_by(self, files: TokenizerFiles) -> bool:
        if not self.files:
            return True
        own, others = read_tokens(self.tokenizer).ids, read_tokens(files).ids
        return own.items() < others.items()

    def _check_eos(self, ids: Mapping[str, int], files: TokenizerFiles) -> None:
        """Raise `ConfigError` where another tokenizer has other ids for known EOS tokens."""
        texts = {number: text for text, number in read_tokens(self.tokenizer).ids.items()}
        for number in self.eos_token_ids:
            text = texts.get(number)
            if text is not None and ids.get(text, number) != number:
                raise ConfigError(
                    f"the tokenizer in {files.place} gives {text!r} the id {ids[text]}, but the "
                    f"model ends a text with it as {number}: give the tokenizer that the model was "
                    f"trained with."
                )

    def _with_templates(self, sources: Mapping[str, str]) -> Self:
        if sources == self.tokenizer.chat_templates:
            return self
        return replace(self, files=dict(self.tokenizer.with_templates(sources).contents))

    def _with_eos(self, ids: Iterable[int], all_ids: Iterable[int]) -> Self:
        """A copy with these EOS tokens in config.json, and `all_ids` in generation_config.json."""
        token_ids = self.token_ids | _join_eos(ids)
        generation = self.generation and self.generation | _join_eos(all_ids)
        return replace(self, token_ids=token_ids, generation=generation)

    def write(self, directory: Path) -> None:
        """Write the tokenizer's files and generation_config.json to a directory."""
        files = dict(self.files)
        if self.generation:
            files[GENERATION] = (json.dumps(self.generation, indent=2) + "\n").encode()
        TokenizerFiles(self.tokenizer.place, files).write(directory)


def _as_list(token: TokenId | None) -> list[int]:
    return token if isinstance(token, list) else [] if token is None else [token]


def _eos_of(fields: Mapping[str, Any]) -> list[int]:
    return _as_list(fields.get("eos_token_id"))


def _join_eos(ids: Iterable[int]) -> dict[str, TokenId]:
    """The field `eos_token_id` of these ids: a list, or a number if there is only one."""
    ids = list(dict.fromkeys(ids))
    return {"eos_token_id": ids if len(ids) > 1 else ids[0]} if ids else {}


def _token_ids(fields: Mapping[str, Any], files: TokenizerFiles) -> dict[str, TokenId]:
    """The token ids among the fields of config.json or generation_config.json."""
    found = {name: fields.get(name) for name in (f"{role}_token_id" for role in _ROLES)}
    try:
        known = {name: token for name, token in found.items() if token is not None and token != []}
        return msgspec.convert(known, dict[str, TokenId])
    except msgspec.ValidationError as error:
        raise ConfigError(f"a token id beside {files.place} is no number: {error}.") from error


def _special_token_ids(files: TokenizerFiles) -> dict[str, TokenId]:
    """The ids of the BOS, EOS and padding tokens that a tokenizer's files name."""
    tokens = read_tokens(files)
    texts = {role: tokens.named.get(f"{role}_token") for role in _ROLES}
    return {
        f"{role}_token_id": tokens.ids[text]
        for role, text in texts.items()
        if text is not None and text in tokens.ids
    }


def _with_config(files: TokenizerFiles, ends: Sequence[int]) -> TokenizerFiles:
    """Return files with a tokenizer_config.json, from which transformers knows the EOS token."""
    if CONFIG in files.contents:
        return files
    fields: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    texts = {number: text for text, number in read_tokens(files).ids.items()}
    if ends and ends[0] in texts:
        fields["eos_token"] = texts[ends[0]]
    described = {CONFIG: json.dumps(fields, indent=2).encode()}
    return TokenizerFiles(files.place, {**files.contents, **described})


def _without_generation(files: TokenizerFiles) -> dict[str, bytes]:
    return {name: content for name, content in files.contents.items() if name != GENERATION}


def _read_config(folder: str) -> dict[str, Any]:
    """Read the config.json of a model's directory; empty where there is none."""
    try:
        path = local_copy(f"{folder}/config.json")
    except ConfigError:
        return {}
    contents = {path.name: path.read_bytes()} if path.is_file() else {}
    return TokenizerFiles(folder, contents).json(path.name)


def _decompress(name: str, content: bytes, room: int) -> bytes:
    """Decompress a file. Raises `ConfigError` where it is larger than `room`, or damaged."""
    try:
        stream = zlib.decompressobj()
        found = stream.decompress(content, room + 1)
    except zlib.error as error:
        raise ConfigError(f"{name} in the checkpoint's metadata is damaged ({error}).") from error
    if len(found) > room:
        raise ConfigError(
            f"{name} in the checkpoint's metadata has more bytes than tokenizers have "
            f"({_LARGEST >> 20} MiB): the metadata are not ones that jaxpipe wrote."
        )
    return found
