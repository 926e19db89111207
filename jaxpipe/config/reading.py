"""A configuration read from TOML and overrides, and written back.

Every error is a `ConfigError` whose message is one sentence: the rule, the values, the place and
the remedy.
"""

import difflib
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import tomli_w

from jaxpipe.config.errors import ConfigError
from jaxpipe.config.sections import Config
from jaxpipe.model import FAMILIES, PRESETS, ModelConfig

_LISTED = {tuple[int, ...]: "integers", tuple[str, ...]: "strings"}


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, apply overrides `section.key=value`, and check names, types and ranges.

    An override is a line of TOML; a value that is no TOML value is taken as a string, so
    `parallel.schedule=gpipe` needs no quotes. Checks across fields: `jaxpipe.planning.checks`.
    """
    path = Path(path)
    try:
        tree = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration {path} ({error.strerror}): give the path of a TOML "
            f"file, such as configs/quickstart.toml."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error
    for override in overrides:
        tree = _merge(tree, _parse_override(override))
    tree = _with_preset(tree)
    sections = _sections(tree)
    _check_names(tree, sections)
    _check_values(tree, sections)
    config = from_builtins(tree)
    _check_finite(config)
    if config.run.dir:
        return config
    run = msgspec.structs.replace(config.run, dir=f"runs/{path.stem}")
    return msgspec.structs.replace(config, run=run)


def from_builtins(tree: Mapping[str, Any]) -> Config:
    """A configuration from `msgspec.to_builtins` of one, with names and types checked.

    Raises `msgspec.ValidationError`.
    """
    return msgspec.convert(tree, Config[_sections(tree)["model"]])  # type: ignore[misc]


def to_toml(config: Config) -> str:
    """The whole configuration, defaults included, as TOML that `load` reads back to the same."""
    return tomli_w.dumps(msgspec.to_builtins(config))


def _parse_override(text: str) -> dict[str, Any]:
    key, separator, value = text.partition("=")
    if not separator or not re.fullmatch(r"\w+(\.\w+)+", key.strip()):
        raise ConfigError(
            f"override {text!r} is not of the form section.key=value, such as parallel.pp=2."
        )
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return tomllib.loads(tomli_w.dumps({"value": value.strip()}).replace("value", key, 1))


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _with_preset(tree: dict[str, Any]) -> dict[str, Any]:
    model = tree.get("model")
    name = model.get("preset") if isinstance(model, Mapping) else None
    if not name or not isinstance(name, str):
        return tree
    if name not in PRESETS:
        raise ConfigError(f"unknown model.preset={name!r}: use one of {', '.join(PRESETS)}.")
    family = PRESETS[name]["family"]
    if model.get("family", family) != family:
        raise ConfigError(
            f"model.preset={name!r} is of the family {family!r}, but model.family="
            f"{model['family']!r}: leave one of them out."
        )
    return tree | {"model": PRESETS[name] | model}


def _sections(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The record of every section, that of `[model]` by its family."""
    model = tree.get("model")
    name = (model if isinstance(model, Mapping) else {}).get("family", ModelConfig.DEFAULT)
    if name not in FAMILIES:
        raise ConfigError(f"unknown model.family={name!r}: use one of {', '.join(FAMILIES)}.")
    return get_type_hints(Config) | {"model": FAMILIES[name].config}


_ELSEWHERE = {  # sections of other trainers, and where their settings are here
    "distributed": "parallel",
    "multi_stage": "parallel",
    "schedule": "parallel",
    "scheduler": "optimizer",
    "training": "train",
    "metrics": "log",
    "eval": "train",
}


def _check_names(tree: Mapping[str, Any], sections: Mapping[str, Any]) -> None:
    for name, section in tree.items():
        if name not in sections:
            near = _nearest(name, sections)
            if name in _ELSEWHERE:
                near = f": did you mean {_ELSEWHERE[name]}?"
            raise ConfigError(f"unknown section [{name}]{near}.")
        if not isinstance(section, Mapping):
            raise ConfigError(f"{name} must be a section [{name}], not the value {section!r}.")
        fields = sections[name].__struct_fields__
        for key in section:
            if key not in fields:
                near = _nearest(key, fields, prefix=f"{name}.")
                raise ConfigError(
                    f"unknown key {name}.{key}{near}; [{name}] has {', '.join(fields)}."
                )


def _check_finite(config: Config) -> None:
    for name, section in msgspec.to_builtins(config).items():
        for key, value in section.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{name}.{key}={value} is not finite: give a finite number.")


def _nearest(word: str, known: Any, prefix: str = "") -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f": did you mean {prefix}{near[0]}?" if near else f": known are {', '.join(known)}"


def _check_values(tree: Mapping[str, Any], sections: Mapping[str, Any]) -> None:
    """Every value is there where it must be, and of its field's type and range."""
    for name, section in sections.items():
        given, hints = tree.get(name, {}), get_type_hints(section, include_extras=True)
        for field in msgspec.structs.fields(section):
            key = f"{name}.{field.name}"
            if field.name in given:
                _check_value(key, given[field.name], hints[field.name])
            elif field.required and (name in tree or _is_required(name)):
                raise ConfigError(f"{key} is missing: give it a value.")


def _is_required(section: str) -> bool:
    return next(field.required for field in msgspec.structs.fields(Config) if field.name == section)


def _check_value(key: str, value: Any, hint: Any) -> None:
    kinds = (hint, *get_args(hint))
    choices = [repr(v) for kind in kinds if get_origin(kind) is Literal for v in get_args(kind)]
    choices += [f"a list of {_LISTED[kind]}" for kind in kinds if kind in _LISTED]
    choices += ["true", "false"] if choices and bool in kinds else []
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        if choices and not isinstance(value, list):
            raise ConfigError(
                f"unknown {key}={value!r}: use one of {', '.join(choices)}."
            ) from error
        rule, _, place = str(error).partition(" - at `$")  # place: an entry of a list, "[1]`"
        expected = rule.partition(", got ")[0]  # "Expected `int` >= 1"
        for index, name in re.findall(r"\[(\d+)\]|\.(\w+)", place):
            value = value[int(index)] if index else value[name]
        raise ConfigError(f"{key}{place[:-1]}: {expected.lower()}, got {value!r}.") from error
