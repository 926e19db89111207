"""Files and settings that text generation needs besides the weights.

They are the BOS, EOS and padding token ids, the longest context, the dtype, sampling defaults and
the tokenizer's files. A checkpoint keeps them in its metadata, and a run that starts from such a
checkpoint copies them into each of its own checkpoints.
"""

import base64
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from jaxpipe.config import ConfigError

GENERATION = "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_ROLES = ("bos", "eos", "pad")
VOCABULARIES = (
    TOKENIZER, "tokenizer.model", "spiece.model", "vocab.json", "tekken.json", "tiktoken.model",
)  # fmt: skip
_FILES = (
    *VOCABULARIES,
    TOKENIZER_CONFIG,
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "tokenization_*.py",  # code that tokenizer_config.json names
)

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
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens at which generation stops; empty: none is known."""
        return tuple(_eos_of(self.generation) or _eos_of(self.token_ids))

    @property
    def prefix_token_id(self) -> int | None:
        """The token before a text that has none before it; None: not known.

        It is BOS, or else EOS, of the tokenizer, or of config.json where the tokenizer has neither.
        """
        for known in (_special_token_ids(self.files), self.token_ids):
            ids = _as_list(known.get("bos_token_id")) or _as_list(known.get("eos_token_id"))
            if ids:
                return ids[0]
        return None

    @classmethod
    def read(cls, directory: Path, config: Mapping[str, Any]) -> Self:
        """Read them from a Hugging Face directory.

        `config` is its config.json with defaults filled in.
        """
        names = (f"{role}_token_id" for role in _ROLES)
        return cls(
            token_ids={name: config[name] for name in names if config.get(name) is not None},
            max_positions=config.get("max_position_embeddings") or config.get("n_positions") or 0,
            dtype=config.get("dtype") or config.get("torch_dtype") or "",
            generation=_read_json(directory / GENERATION),
            files=_read_tokenizer_files(directory),
        )

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Self:
        """Unpack them from a checkpoint's metadata; all fields are unknown if it has none."""
        fields = dict(meta.get("huggingface") or {})
        files = fields.pop("files", {})
        unpacked = {name: zlib.decompress(base64.b64decode(text)) for name, text in files.items()}
        return cls(**fields, files=unpacked)

    def as_meta(self) -> dict[str, Any]:
        """The metadata entry that `from_meta` reads; empty if nothing is known."""
        if self == type(self)():
            return {}
        packed = {
            name: base64.b64encode(zlib.compress(content)).decode()
            for name, content in self.files.items()
        }
        return {"huggingface": asdict(self) | {"files": packed}}

    def with_tokenizer(self, directory: Path, vocab_size: int) -> Self:
        """A copy with the tokenizer, token ids and sampling defaults of another directory.

        Raises `ConfigError` where the directory holds no tokenizer, or an id is not below
        `vocab_size`.
        """
        files = _read_tokenizer_files(directory)
        if not {*VOCABULARIES} & files.keys():
            raise ConfigError(
                f"{directory} holds no tokenizer ({', '.join(VOCABULARIES)}): give the directory "
                f"with the files that `save_pretrained` of a tokenizer wrote."
            )
        config = directory / "config.json"
        of_model = type(self).read(directory, _read_json(config)).token_ids
        ids = _special_token_ids(files) | of_model
        for name, token in ids.items():
            if max(_as_list(token)) >= vocab_size:
                raise ConfigError(
                    f"the tokenizer in {directory} has {name}={token}, but model.vocab_size="
                    f"{vocab_size}: give the tokenizer that the model was trained with."
                )
        generation = _read_json(directory / GENERATION)
        return replace(self, token_ids=ids, generation=generation, files=files)

    def with_eos_tokens(self, tokens: Sequence[int], tokenizer: Path | None) -> Self:
        """A copy in which `tokens` are EOS tokens too.

        Args:
          tokens: that end documents or turns in the training data.
          tokenizer: path of the training data's tokenizer.json, which is used if no other tokenizer
            is known.
        """
        copy = self
        if not self.files and tokenizer is not None and tokenizer.is_file():
            files = {TOKENIZER: tokenizer.read_bytes()}
            described: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
            names = {number: name for name, number in _iterate_tokens(files)}
            if tokens and tokens[0] in names:
                described["eos_token"] = names[tokens[0]]
            files[TOKENIZER_CONFIG] = json.dumps(described, indent=2).encode()
            copy = replace(copy, files=files)
        if not tokens:
            return copy
        ids = copy.token_ids | _join_eos([*_eos_of(copy.token_ids), *tokens])
        generation = copy.generation and copy.generation | _join_eos([*copy.eos_token_ids, *tokens])
        return replace(copy, token_ids=ids, generation=generation)

    def write(self, directory: Path) -> None:
        """Write the tokenizer's files and generation_config.json to a directory."""
        files = dict(self.files)
        if self.generation:
            files[GENERATION] = (json.dumps(self.generation, indent=2) + "\n").encode()
        for name, content in files.items():
            path = directory / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)


def _as_list(token: TokenId | None) -> list[int]:
    return token if isinstance(token, list) else [] if token is None else [token]


def _eos_of(fields: Mapping[str, Any]) -> list[int]:
    return _as_list(fields.get("eos_token_id"))


def _join_eos(ids: list[int]) -> dict[str, TokenId]:
    """The field `eos_token_id` of these ids: a list, or a number if there is only one."""
    ids = list(dict.fromkeys(ids))
    return {"eos_token_id": ids if len(ids) > 1 else ids[0]}


def _read_tokenizer_files(directory: Path) -> dict[str, bytes]:
    paths = [path for pattern in _FILES for path in sorted(directory.glob(pattern))]
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def _special_token_ids(files: Mapping[str, bytes]) -> dict[str, TokenId]:
    """The ids of the BOS, EOS and padding tokens that tokenizer_config.json names."""
    described, ids = _parse_file(files, TOKENIZER_CONFIG), dict(_iterate_tokens(files))
    special_ids: dict[str, TokenId] = {}
    for role in _ROLES:
        token = described.get(f"{role}_token")
        name = token.get("content") if isinstance(token, dict) else token
        if name in ids:
            special_ids[f"{role}_token_id"] = ids[name]
    return special_ids


def _iterate_tokens(files: Mapping[str, bytes]) -> Iterator[tuple[str, int]]:
    """Yield (name, id) of every token of a tokenizer, added tokens last."""
    whole = _parse_file(files, TOKENIZER)
    vocabulary = whole.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):  # a SentencePiece unigram model: [name, score] by id
        vocabulary = {name: number for number, (name, _) in enumerate(vocabulary)}
    yield from (vocabulary or _parse_file(files, "vocab.json")).items()
    yield from _parse_file(files, "added_tokens.json").items()
    for number, token in (
        _parse_file(files, TOKENIZER_CONFIG).get("added_tokens_decoder", {}).items()
    ):
        yield token["content"], int(number)
    yield from ((token["content"], token["id"]) for token in whole.get("added_tokens", ()))


def _parse_file(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    return _decode(files[name], name) if name in files else {}


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty where the file does not exist."""
    return _decode(path.read_bytes(), str(path)) if path.is_file() else {}


def _decode(content: bytes, name: str) -> dict[str, Any]:
    try:
        return dict(json.loads(content))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{name} is not a JSON object ({error}): correct it.") from error
