"""The files of a tokenizer's folder: their names, and one way to read them everywhere."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Self

import msgspec

from jaxpipe.config import ConfigError
from jaxpipe.config.paths import is_address
from jaxpipe.runtime.storage.files import local_copy

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
SPECIAL_TOKENS, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
GENERATION = "generation_config.json"
BYTES = "bytes"  # names the tokenizer with one token per byte
TEMPLATE, PROCESSOR_TEMPLATE = "chat_template.jinja", "chat_template.json"
MORE_TEMPLATES = "additional_chat_templates"
# Models for which transformers 5 takes tokenizer.json as it is, although they name LlamaTokenizer.
_BY_FILE = ("mistral", "mixtral")
# The class that it takes for a model whose files name none; for `_FORCED` whatever they name.
_BY_MODEL = {
    "gemma3": "GemmaTokenizer", "gemma3_text": "GemmaTokenizer", "gpt2": "GPT2Tokenizer",
    "qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer", "qwen3_moe": "Qwen2Tokenizer",
}  # fmt: skip
_FORCED = ("qwen2",)
VOCABULARIES = (
    TOKENIZER, "tokenizer.model", "spiece.model", "vocab.json", "tekken.json", "tiktoken.model",
)  # fmt: skip
_PATTERNS = (
    *VOCABULARIES, CONFIG, "merges.txt", SPECIAL_TOKENS, ADDED_TOKENS, GENERATION, TEMPLATE,
    PROCESSOR_TEMPLATE, f"{MORE_TEMPLATES}/*.jinja",
    "tokenization_*.py",  # code that tokenizer_config.json names
)  # fmt: skip


def is_tokenizer_file(name: str) -> bool:
    """Whether a path within a folder is that of a tokenizer's file.

    >>> is_tokenizer_file("additional_chat_templates/tool_use.jinja"), is_tokenizer_file("../a.py")
    (True, False)
    """
    parts = name.split("/")
    return any(
        len(parts) == pattern.count("/") + 1 and all(map(fnmatchcase, parts, pattern.split("/")))
        for pattern in _PATTERNS
    )


@dataclass(frozen=True, eq=False)
class TokenizerFiles:
    """The content of a tokenizer's files.

    Attributes:
      place: the folder that they are from, for messages.
      contents: of each file, by its path within the folder.
    """

    place: str
    contents: Mapping[str, bytes]

    @classmethod
    def read(cls, name: "str | Path | Self") -> Self:
        """Read a folder, or the `tokenizer.json` in one with the files beside it, or `bytes`.

        From an address only these files are read, not the weights beside them. A file of another
        name is read alone where its folder has a `tokenizer.json`, to which the others belong.

        Raises `ConfigError` where there is no such folder or file, or it cannot be read.
        """
        if isinstance(name, cls):
            return name  # they have been read
        if name == BYTES:
            return cls(BYTES, _write_bytes())
        path = _local_files(str(name))
        try:
            if path.is_dir():
                return cls(str(name), _read_folder(path))
            own, folder = {TOKENIZER: path.read_bytes()}, path.parent
            if path.name != TOKENIZER and (folder / TOKENIZER).exists():
                return cls(str(name), own)
            return cls(str(name).rpartition("/")[0] or ".", _read_folder(folder) | own)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ConfigError(
                f"{name} does not exist: give a {TOKENIZER}, a model's directory with one, or "
                f"'bytes'."
            ) from error
        except OSError as error:
            raise ConfigError(
                f"{error.filename or name} cannot be read ({error.strerror}): make it readable."
            ) from error

    def json(self, name: str) -> dict[str, Any]:
        """Return a file's JSON object; empty if there is no such file.

        Raises `ConfigError` where it is no JSON object, or nested too deeply.
        """
        if name not in self.contents:
            return {}
        try:
            return msgspec.json.decode(self.contents[name], type=dict[str, Any])
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{name} of {self.place} is not a JSON object ({error}): correct it."
            ) from error

    def text(self, name: str) -> str:
        """Return a file's text. Raises `ConfigError` where it is not UTF-8."""
        try:
            return self.contents[name].decode()
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{name} of {self.place} is not UTF-8 ({error}): correct it."
            ) from error

    @property
    def is_bytes(self) -> bool:
        """Whether the tokenizer is `bytes`."""
        return self.contents.get(TOKENIZER) == _write_bytes()[TOKENIZER]

    @property
    def chat_templates(self) -> dict[str, str]:
        """Jinja by name: `default`, and perhaps `tool_use` and others; empty if there is none.

        Raises `ConfigError` where templates have no names, or none is the default.
        """
        if TEMPLATE in self.contents:
            more = [name for name in sorted(self.contents) if name.startswith(MORE_TEMPLATES)]
            sources = {PurePosixPath(name).stem: self.text(name) for name in more}
            return sources | {"default": self.text(TEMPLATE)}
        for file in (PROCESSOR_TEMPLATE, CONFIG):
            templates = self.json(file).get("chat_template")
            if isinstance(templates, str) and templates:
                return {"default": templates}
            if not templates:
                continue
            try:
                sources = {str(one["name"]): str(one["template"]) for one in templates}
            except (TypeError, KeyError):
                sources = {}
            if "default" in sources:
                return sources
            raise ConfigError(
                f"{file} of {self.place} has no chat template with the name default: name one so."
            )
        return {}

    def with_templates(self, sources: Mapping[str, str]) -> Self:
        """Return files with these chat templates instead of their own."""
        kept = {
            name: content
            for name, content in self.contents.items()
            if name not in (TEMPLATE, PROCESSOR_TEMPLATE) and not name.startswith(MORE_TEMPLATES)
        }
        for name, source in sources.items():
            file = TEMPLATE if name == "default" else f"{MORE_TEMPLATES}/{name}.jinja"
            kept[file] = source.encode()
        return type(self)(self.place, kept)

    @property
    def digest(self) -> str:
        """A digest of the names and contents of all files."""
        state = hashlib.blake2b(digest_size=16)
        for name, content in sorted(self.contents.items()):
            state.update(f"{name}\0{len(content)}\0".encode() + content)
        return state.hexdigest()

    def write(self, folder: Path) -> None:
        """Write the files to a folder. Raises `ConfigError` for a name of no tokenizer's file."""
        for name, content in self.contents.items():
            if not is_tokenizer_file(name):
                raise ConfigError(f"{self.place} has {name!r}, which is no file of a tokenizer.")
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)


@cache
def _write_bytes() -> dict[str, bytes]:
    """Return the files of a tokenizer whose ids are the bytes of UTF-8, for other programs."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's letters of bytes
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown}
    letters |= {byte: chr(256 + number) for number, byte in enumerate(hidden)}
    level = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False,
    }  # fmt: skip
    model: dict[str, Any] = {
        "type": "BPE", "dropout": None, "unk_token": None, "merges": [],
        "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
        "byte_fallback": False, "vocab": {letters[byte]: byte for byte in range(256)},
    }  # fmt: skip
    tokenizer: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": model,
    }  # fmt: skip
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    files = {TOKENIZER: tokenizer, CONFIG: config}
    return {name: (json.dumps(fields, indent=1) + "\n").encode() for name, fields in files.items()}


def _local_files(name: str) -> Path:
    """Return the path of a tokenizer's folder or file, or of a copy of those at an address."""
    if not is_address(name):
        return Path(name)
    folder, _, file = name.rstrip("/").rpartition("/")
    if not file.endswith(".json"):
        return local_copy(name, lambda one: is_tokenizer_file(one) or one == "config.json")
    try:
        wanted = ("config.json", file)
        return local_copy(folder, lambda one: is_tokenizer_file(one) or one in wanted) / file
    except ConfigError:
        return local_copy(name)  # a web server does not list folders


def _read_folder(folder: Path) -> dict[str, bytes]:
    more = folder / MORE_TEMPLATES
    names = [path.name for path in folder.iterdir()]
    names += [f"{MORE_TEMPLATES}/{path.name}" for path in more.iterdir()] if more.is_dir() else []
    wanted = filter(is_tokenizer_file, sorted(names))
    contents = {name: (folder / name).read_bytes() for name in wanted}
    beside = {name: (folder / name).read_bytes() for name in {"config.json"} & {*names}}
    files = TokenizerFiles(str(folder), contents | beside)
    config, model = files.json(CONFIG), files.json("config.json")
    named, model_type = config.get("tokenizer_class"), str(model.get("model_type"))
    chosen = named or model.get("tokenizer_class") or _BY_MODEL.get(model_type)
    if model_type in _BY_FILE and str(chosen).startswith("Llama"):
        chosen = "PreTrainedTokenizerFast"
    elif model_type in _FORCED:
        chosen = _BY_MODEL[model_type]
    if (
        TOKENIZER in contents
        and chosen
        and str(chosen).removesuffix("Fast") != str(named).removesuffix("Fast")
    ):
        # Copies have no config.json beside them, or another one.
        config["tokenizer_class"] = chosen
        contents[CONFIG] = json.dumps(config, indent=2, ensure_ascii=False).encode()
    return contents
