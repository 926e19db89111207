"""The tokens that a tokenizer's files add to `tokenizer.json`, and names of special tokens.

Tokens stand in four files. `tokenizer.json` has the vocabulary and added tokens of its own;
`tokenizer_config.json` may have further ones in `added_tokens_decoder`, else `added_tokens.json`
and `special_tokens_map.json` do; and a special token that has no id anywhere gets the next one.

Source: transformers, `tokenization_utils_base.py` and `tokenization_utils_tokenizers.py`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxpipe.config import ConfigError
from jaxpipe.tokenizer.classes import default_tokens, is_rebuilt
from jaxpipe.tokenizer.files import (
    ADDED_TOKENS,
    CONFIG,
    SPECIAL_TOKENS,
    TOKENIZER,
    TokenizerFiles,
)

_EXTRA = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_ROLES = tuple(
    f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)  # fmt: skip


@dataclass(frozen=True)
class TokenizerTokens:
    """The tokens of a tokenizer.

    Attributes:
      added: tokens to add to those of `tokenizer.json`, in this order: arguments of
        `tokenizers.AddedToken`.
      named: the text of special tokens by name, such as `eos_token`.
      ids: the id of every token of the vocabulary and of `added` by its text.
    """

    added: tuple[Mapping[str, Any], ...]
    named: Mapping[str, str]
    ids: Mapping[str, int]


def read_tokens(files: TokenizerFiles) -> TokenizerTokens:
    """Read the tokens of all files.

    Raises `ConfigError` where the files disagree about an id, or an entry is not understood.
    """
    config, vocabulary, own = files.json(CONFIG), *_read_vocabulary(files)
    defaults = {name: _token(text, files, name) for name, text in default_tokens(files).items()}
    named, extra = _read_named(config, files, CONFIG)
    stated = _read_stated(config.get("added_tokens_decoder"), files)
    if stated is None:
        more, more_extra = _read_named(files.json(SPECIAL_TOKENS), files, SPECIAL_TOKENS)
        named, extra = named | more, extra or more_extra
        stated = _read_legacy(files, _plain(config, more)) | own
    elif is_rebuilt(files):
        _check_kept(own, stated, files)
    given = {name: token for name, token in {**defaults, **named}.items() if token}
    order = sorted(given, key=lambda name: _ROLES.index(name) if name in _ROLES else len(_ROLES))
    known = {token["content"] for token in own.values()}
    added = [stated[number] for number in sorted(stated)]
    known |= {token["content"] for token in added}
    # A token that stands twice has the flags of the last one.
    added += [t for t in (*(given[name] for name in order), *extra) if t["content"] not in known]
    texts = {name: token["content"] for name, token in given.items()}
    added = [
        token | {"special": token["special"] or token["content"] in texts.values()}
        for token in added
    ]
    ids = vocabulary | {token["content"]: number for number, token in own.items()}
    if TOKENIZER in files.contents:
        ids |= _assign_ids(added, vocabulary, own)
        for number, token in stated.items():
            if ids[token["content"]] != number:
                raise ConfigError(
                    f"the files of the tokenizer {files.place} disagree: {token['content']!r} has "
                    f"id {number} in {CONFIG} or {ADDED_TOKENS}, but comes to id "
                    f"{ids[token['content']]} after the tokens of {TOKENIZER}: correct one of them."
                )
        _check_all_known(files, ids)
    else:
        ids |= {token["content"]: number for number, token in stated.items()}
    return TokenizerTokens(tuple(added), texts, ids)


def _read_vocabulary(files: TokenizerFiles) -> tuple[dict[str, int], dict[int, dict[str, Any]]]:
    """Return the ids of the model's vocabulary, and the added tokens of tokenizer.json by id."""
    whole = files.json(TOKENIZER)
    try:
        vocabulary = (whole.get("model") or {}).get("vocab") or files.json("vocab.json")
        if isinstance(vocabulary, list):  # a SentencePiece unigram model: [name, score] by id
            vocabulary = {name: number for number, (name, *_) in enumerate(vocabulary)}
        own = {int(one["id"]): one for one in whole.get("added_tokens") or ()}
        tokens = {
            number: _token({k: v for k, v in one.items() if k != "id"}, files, TOKENIZER)
            for number, one in own.items()
        }
        return {str(name): int(number) for name, number in vocabulary.items()}, tokens
    except ConfigError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{TOKENIZER} of {files.place} is no tokenizer: its vocabulary or its added tokens "
            f"are not as `tokenizers` writes them: give another."
        ) from error


def _read_named(
    fields: Mapping[str, Any], files: TokenizerFiles, where: str
) -> tuple[dict[str, dict[str, Any] | None], list[dict[str, Any]]]:
    """Return the special tokens of a file by name (None: there is none), and those without a name.

    A token that no file gives flags is special, as transformers takes it.
    """
    named: dict[str, dict[str, Any] | None] = {}
    extra: list[dict[str, Any]] = []
    for key, value in fields.items():
        if key.endswith("_token") and (value is None or isinstance(value, str | dict)):
            named[key] = None if value is None else _token(value, files, f"{key} of {where}")
    if all(map(fields.get, _EXTRA)):
        raise ConfigError(
            f"{where} of {files.place} has both {' and '.join(_EXTRA)}: take one of them out."
        )
    for key in _EXTRA:
        value = fields.get(key)
        if isinstance(value, dict):
            named |= {name: _token(one, files, f"{key} of {where}") for name, one in value.items()}
        elif isinstance(value, list):
            extra = [_token(one, files, f"{key} of {where}") for one in value]
        elif value:
            raise ConfigError(
                f"{key} of {where} of {files.place} is no list of tokens: correct it."
            )
    return named, extra


def _read_stated(value: Any, files: TokenizerFiles) -> dict[int, dict[str, Any]] | None:
    """Return the tokens of `added_tokens_decoder` by id; None where there is no such field."""
    if value is None:
        return None
    where = f"added_tokens_decoder of {CONFIG}"
    try:
        return {
            int(number): _token(token, files, where, special=False)
            for number, token in value.items()
        }
    except ConfigError:
        raise
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{where} of {files.place} does not map ids to tokens: correct it."
        ) from error


def _read_legacy(files: TokenizerFiles, special: set[str]) -> dict[int, dict[str, Any]]:
    """Return the tokens of added_tokens.json by id."""
    tokens = {}
    for text, number in files.json(ADDED_TOKENS).items():
        if type(number) is not int or number < 0:
            raise ConfigError(
                f"{ADDED_TOKENS} of {files.place} maps {text!r} to no id: correct it."
            )
        tokens[number] = _token(text, files, ADDED_TOKENS, special=text in special)
    return tokens


def _plain(config: Mapping[str, Any], named: Mapping[str, Any]) -> set[str]:
    """Return the texts of special tokens whose entry in added_tokens.json is special.

    transformers compares them before it reads the objects of tokenizer_config.json.
    """
    roles = {**config, **{role: token and token["content"] for role, token in named.items()}}
    extra = next((config[key] for key in _EXTRA if config.get(key)), ())
    texts = (*map(roles.get, _ROLES), *extra)
    return {text for text in texts if isinstance(text, str)}


def _token(value: Any, files: TokenizerFiles, where: str, special: bool = True) -> dict[str, Any]:
    """Return the arguments of `tokenizers.AddedToken` of a text, or of an object with flags."""
    fields = {"content": value} if isinstance(value, str) else dict(value)
    fields.pop("__type", None)
    flags = {"special": special} | fields
    flags = {flag: flags.get(flag, False) for flag in _FLAGS} | {
        "normalized": flags.get("normalized", not flags["special"]), "content": flags["content"]
    }  # fmt: skip
    unknown = fields.keys() - flags.keys()
    types = {type(flag) for name, flag in flags.items() if name != "content"}
    if unknown or types != {bool} or type(flags["content"]) is not str:
        raise ConfigError(
            f"a token of {where} of {files.place} has {', '.join(sorted(unknown)) or fields}, "
            f"which is not understood: give content and {', '.join(_FLAGS)}."
        )
    return flags


def _assign_ids(
    added: Iterable[Mapping[str, Any]],
    vocabulary: Mapping[str, int],
    own: Mapping[int, Mapping[str, Any]],
) -> dict[str, int]:
    """Return the ids that `tokenizers.Tokenizer.add_tokens` gives, by text."""
    ids = {token["content"]: number for number, token in own.items()}
    for token in added:
        text = token["content"]
        if text and text not in ids:
            after = max(ids.values(), default=-1) + 1
            ids[text] = vocabulary.get(text, max(after, len(vocabulary)))
    return ids


def _check_kept(
    own: Mapping[int, Mapping[str, Any]],
    stated: Mapping[int, Mapping[str, Any]],
    files: TokenizerFiles,
) -> None:
    """Raise `ConfigError` for a token of tokenizer.json that a class of transformers drops."""
    kept = {token["content"] for token in stated.values()}
    lost = [token["content"] for token in own.values() if token["content"] not in kept]
    if lost:
        raise ConfigError(
            f"the files of the tokenizer {files.place} disagree: {lost[0]!r} is an added token of "
            f"{TOKENIZER}, but not in added_tokens_decoder of {CONFIG}: add it there."
        )


def _check_all_known(files: TokenizerFiles, ids: Mapping[str, int]) -> None:
    """Raise `ConfigError` for a token of a file that other files keep from being read."""
    for text, number in _iterate_legacy(files):
        if text not in ids or number not in (None, ids[text]):
            of = f"with id {number}" * (number is not None)
            raise ConfigError(
                f"the files of the tokenizer {files.place} disagree: {SPECIAL_TOKENS} or "
                f"{ADDED_TOKENS} has {text!r} {of}, but {CONFIG} and {TOKENIZER} have no such "
                f"token: correct one of them."
            )


def _iterate_legacy(files: TokenizerFiles) -> Iterator[tuple[str, int | None]]:
    """Yield texts, and ids where they are known, of all tokens of the two older files."""
    named, extra = _read_named(files.json(SPECIAL_TOKENS), files, SPECIAL_TOKENS)
    yield from ((token["content"], None) for token in (*named.values(), *extra) if token)
    yield from ((token["content"], n) for n, token in _read_legacy(files, set()).items())
