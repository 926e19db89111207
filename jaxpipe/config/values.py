"""Check the value of a setting against its type, and say how the right value is written."""

import difflib
from collections.abc import Iterable
from contextlib import suppress
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from jaxpipe.config.errors import ConfigError

_ITEMS = {int: "integers", str: "strings"}
_SHORT = {  # spellings of PyTorch and Hugging Face that share too few letters with those here
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
}  # fmt: skip
_TOML = {"`array`": "a list", "`object`": "a table `{...}`"}  # msgspec speaks of JSON


def check_value(key: str, value: Any, hint: Any) -> None:
    """Raise `ConfigError` if a value from TOML is not of the type `hint` of the setting `key`."""
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise ConfigError(_refusal(key, value, hint, str(error))) from error


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name that is most similar to a word, or None if none shares most letters."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return near[0] if near else None


def _refusal(key: str, value: Any, hint: Any, rule: str) -> str:
    rule, _, place = rule.partition(" - at `$")  # place: an entry of a list, "[1]`"
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    items = next((_ITEMS[item] for kind in kinds if (item := _item(kind)) in _ITEMS), "")
    if not place and choices:
        listed = [repr(choice) for choice in choices]
        listed += [f"a list of {items}"] * bool(items) + ["true", "false"] * (bool in kinds)
        least = [kind.__metadata__[0].ge for kind in kinds if get_origin(kind) is Annotated]
        listed += [f"a number of at least {bound}" for bound in least]
        meant = _similar(value, choices)
        meant = f"did you mean {meant!r}? " if meant else ""
        return f"unknown {key}={value!r}: {meant}use one of {', '.join(listed)}."
    if not place and items and not isinstance(value, list):
        words = value.replace(",", " ").split() if isinstance(value, str) else [value]
        words = [f'"{word}"' if items == "strings" else str(word) for word in words]
        example = f": write [{', '.join(words)}], in a shell as {key}='[{', '.join(words)}]'"
        return f"{key}: expected a list of {items}, got {value!r}{example}."
    for word in place.rstrip("`").replace("[", ".").replace("]", "").split(".")[1:]:
        value = value[int(word) if isinstance(value, list) else word]
    key += place.rstrip("`")
    if " field `" in rule:  # of a table in a list
        name, known = rule.split("`")[1], _item(hint).__struct_fields__
        if "missing" in rule:
            return f"{key}.{name} is missing: give it a value."
        meant = f"did you mean {near}? " if (near := nearest(name.lower(), known)) else ""
        return f"unknown key {key}.{name}: {meant}Its keys are {', '.join(known)}."
    expected = rule.partition(", got ")[0]  # "Expected `int` >= 1"
    sentence = expected[:1].lower() + expected[1:]  # names in it keep their case
    for json, toml in _TOML.items():
        sentence = sentence.replace(json, toml)
    return f"{key}: {sentence}, got {value!r}{_other_spelling(expected, value)}."


def _item(hint: Any) -> Any:
    """The type of the items of `tuple[item, ...]`, without its range; None of another type."""
    item = get_args(hint)[0] if get_origin(hint) is tuple else None
    return get_args(item)[0] if get_origin(item) is Annotated else item


def _similar(value: Any, choices: Iterable[Any]) -> Any:
    """The choice that a value means in another spelling, or None."""
    if value is False and "none" in choices:
        return "none"
    words = [choice for choice in choices if isinstance(choice, str)]
    word = str(value).lower().replace("-", "_").removeprefix("torch.")
    word = _SHORT.get(word, word)
    return word if word in words else (isinstance(value, str) and nearest(word, words)) or None


def _other_spelling(expected: str, value: Any) -> str:
    """Advice on a value of the right meaning in the notation of another language."""
    word = str(value).lower()
    if word in ("none", "null"):
        return ": leave the setting out, which takes its default"
    if expected == "Expected `str`" and not isinstance(value, bool | list | dict):
        return """: quote it, in a shell as '"..."'"""
    if expected.startswith("Expected `bool`"):
        for toml, words in {
            "true": ("true", "yes", "on", "1"),
            "false": ("false", "no", "off", "0"),
        }.items():
            if word in words:
                return f": write {toml}"
    if isinstance(value, str) and expected.startswith(("Expected `int`", "Expected `float`")):
        with suppress(ValueError):
            value = float(value)
            if expected.startswith("Expected `float`"):
                return f": write {value}"
    if expected.startswith("Expected `int`") and isinstance(value, float) and value.is_integer():
        return f": write {int(value)}"
    return ""
