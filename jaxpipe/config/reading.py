"""Read a configuration from TOML and overrides, check it, and write it back.

Every error is a `ConfigError` whose message is one sentence: the rule, the values, where they were
given, and a remedy.
"""

import codecs
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import tomli_w

from jaxpipe.config.errors import ConfigError
from jaxpipe.config.foreign import PAGE, SECTIONS, meaning
from jaxpipe.config.path_types import AnyPath, LocalPath, StatePath
from jaxpipe.config.paths import CHECKPOINT_STORES, check_local, check_path, examples
from jaxpipe.config.rules import without_rules
from jaxpipe.config.secrets import mask_secrets
from jaxpipe.config.sections import Config
from jaxpipe.config.values import check_value, nearest
from jaxpipe.model import FAMILIES, PRESETS, ModelConfig

_RENAMED = {  # keys of older configurations, and their present names
    "parallel": {"sdp": "cp", "defer_ends": "defer_embed_head"},
    "optimizer": {"decay_of_ends": "decay_of_embed_head"},
}
_LEAST_FLOAT32, _MOST_FLOAT32 = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # normal numbers


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, apply overrides `section.key=value`, and check names, types and ranges.

    An override is a line of TOML. A value that is not valid TOML is read as a string, so
    `parallel.schedule=gpipe` needs no quotes. Rules across settings are checked by
    `jaxpipe.planning.rules.across`.
    """
    check_local("CONFIG", str(path))
    path = Path(path)
    config = build(_read(path), overrides)
    if config.run.dir:
        return config
    run = msgspec.structs.replace(config.run, dir=f"runs/{path.stem}")
    return msgspec.structs.replace(config, run=run)


def build(tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """The configuration of a tree as TOML has it, with overrides applied, checked as by `load`."""
    tree = _with_preset(_merge(tree, read_overrides(overrides)))
    sections = _sections(tree)
    _check_names(tree, sections)
    _check_values(tree, sections)
    config = from_builtins(tree)
    _check_floats(config)
    _check_paths(config)
    return config


def read_tree(path: str | Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The settings of a TOML file with overrides applied, as a tree of sections, unchecked."""
    return _merge(_read(Path(path)), read_overrides(overrides))


def read_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """The settings of overrides `section.key=value`, as a tree of sections; later ones win."""
    tree: dict[str, Any] = {}
    for override in overrides:
        tree = _merge(tree, _parse_override(override))
    return tree


def from_builtins(tree: Mapping[str, Any]) -> Config:
    """A configuration from the `msgspec.to_builtins` of one, with names and types checked.

    Renamed keys of older saved configurations are accepted.

    Raises:
      msgspec.ValidationError: a name or type is wrong.
    """
    for name, renamed in _RENAMED.items():
        section = {renamed.get(key, key): value for key, value in tree.get(name, {}).items()}
        tree = {**tree, name: section}
    return msgspec.convert(tree, Config[_sections(tree)["model"]])  # type: ignore[misc]


def to_toml(config: Config) -> str:
    """The full configuration, defaults included, as TOML that `load` reads back unchanged.

    Secrets in addresses are masked, which `load` then refuses.
    """
    return tomli_w.dumps(to_builtins(config))


def to_builtins(config: Config) -> dict[str, Any]:
    """The full configuration as tables and lists to keep or to show, with secrets masked."""
    return mask_secrets(msgspec.to_builtins(config))


def _read(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
    except OSError as error:
        if (path / "config.json").is_file():
            path = path / "config.json"
            raise ConfigError(f"{path} is not TOML{_other_format(path)}.") from error
        own = path / "config.toml"
        near = own if own.is_file() else examples() / "quickstart.toml"
        raise ConfigError(
            f"cannot read the configuration {path} ({error.strerror}): give the path of a TOML "
            f"file, such as {near}."
        ) from error
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in content:
        raise ConfigError(f"{path} is not in UTF-8, perhaps in UTF-16: save it as UTF-8.")
    try:
        return tomllib.loads(content.decode("utf-8-sig").replace("\r\n", "\n"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not in UTF-8 ({error}): save it as UTF-8.") from error
    except (ValueError, RecursionError) as error:  # ValueError also for integers of too many digits
        raise ConfigError(f"{path} is not valid TOML: {error}{_other_format(path)}.") from error


def _other_format(path: Path) -> str:
    """Advice on a configuration that is JSON or YAML by its name."""
    if path.suffix == ".json":
        return (
            f": for the config.json of a model from Hugging Face, `python -m jaxpipe.checkpoint "
            f"import {path.parent} --write-config CONFIG` writes the TOML file of a run"
        )
    if path.suffix in (".yaml", ".yml"):
        near = examples() / "quickstart.toml"
        return f": write a TOML file, such as {near}; {PAGE} lists the names here"
    return ""


def _parse_override(text: str) -> dict[str, Any]:
    key, separator, value = text.partition("=")
    if not separator or not re.fullmatch(r"\w+(\.\w+)+", key.strip()):
        raise ConfigError(
            f"override {text!r} is not of the form section.key=value, such as parallel.pp=2."
        )
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return tomllib.loads(tomli_w.dumps({"value": value.strip()}).replace("value", key, 1))


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _with_preset(tree: dict[str, Any]) -> dict[str, Any]:
    model = tree.get("model")
    if not isinstance(model, Mapping):
        return tree
    name = model.get("preset")
    if not name or not isinstance(name, str):
        return tree
    if name not in PRESETS:
        near = nearest(re.sub(r"\W", "_", name.lower().rpartition("/")[2]), PRESETS)
        meant = f"did you mean {near}? " if near else ""
        raise ConfigError(f"unknown model.preset={name!r}: {meant}use one of {', '.join(PRESETS)}.")
    family = PRESETS[name]["family"]
    if model.get("family", family) != family:
        raise ConfigError(
            f"model.preset={name!r} is of the family {family!r}, but model.family="
            f"{model['family']!r}: leave one of them out."
        )
    return tree | {"model": {**PRESETS[name], **model}}


def _sections(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The record class of every section; that of `[model]` depends on the family."""
    model = tree.get("model")
    name = (model if isinstance(model, Mapping) else {}).get("family", ModelConfig.DEFAULT)
    if not isinstance(name, str) or name not in FAMILIES:
        near = nearest(str(name).lower(), FAMILIES)
        meant = f"did you mean {near}? " if near else ""
        raise ConfigError(
            f"unknown model.family={name!r}: {meant}use one of {', '.join(FAMILIES)}."
        )
    return get_type_hints(Config) | {"model": FAMILIES[name].config}


def _check_names(tree: Mapping[str, Any], sections: Mapping[str, Any]) -> None:
    hints = {}
    for name, section in tree.items():
        if name not in sections:
            raise ConfigError(_unknown_section(name, tree, sections))
        if not isinstance(section, Mapping):
            raise ConfigError(f"{name} must be a section [{name}], not the value {section!r}.")
        fields = sections[name].__struct_fields__
        for key in section:
            if now := _RENAMED.get(name, {}).get(key):
                raise ConfigError(
                    f"{name}.{key} is now {name}.{now}: give {name}.{now}={section[key]} instead."
                )
            if key not in fields:
                hints[f"{name}.{key}"] = _hint(name, key, sections)
    if hints:
        several = "s" * (len(hints) > 1)
        listed = "; ".join(f"{key}{hint and ': '}{hint}" for key, hint in hints.items())
        listed += ";" * (not listed.endswith("?"))
        every = "`python -m jaxpipe.train CONFIG --print-config` lists all keys."
        raise ConfigError(f"unknown key{several} {listed} {every}")


def _hint(name: str, key: str, sections: Mapping[str, Any]) -> str:
    """What an unknown key of a section may mean, or an empty string."""
    if there := meaning(name, key):
        return f"other trainers' {key} is {there} here"
    near = _nearest_key(name, key, sections)
    return f"did you mean {near}?" if near else ""


def _unknown_section(name: str, tree: Mapping[str, Any], sections: Mapping[str, Any]) -> str:
    """The error of a section that is none: a misspelt name, or one of another trainer's file."""
    unknown = [other for other in tree if other not in sections]
    others = {
        f"{other}.{key}": here
        for other in unknown if other in SECTIONS and isinstance(tree[other], Mapping)
        for key in tree[other] if (here := _meaning(other, key, sections))
    }  # fmt: skip
    if any(meaning(*name.split(".")) for name in others):  # not a section's name misspelt alone
        names = "; ".join(f"{key} is {here}" for key, here in others.items())
        return (
            f"unknown section{'s' * (len(unknown) > 1)} "
            f"{', '.join(f'[{other}]' for other in unknown)}, as other trainers have: {names}; "
            f"{PAGE} lists more, and {examples()}/ has files to start from."
        )
    near = SECTIONS.get(name) or nearest(name, sections)
    meant = f"did you mean [{near}]? " if near else ""
    return f"unknown section [{name}]: {meant}Sections are {', '.join(sections)}."


def _meaning(section: str, key: str, sections: Mapping[str, Any]) -> str | None:
    """The setting here that a key of another trainer's section is, or None."""
    own = SECTIONS[section]
    same = f"{own}.{key}" if key in sections[own].__struct_fields__ else None
    return meaning(section, key) or same


def _nearest_key(name: str, key: str, sections: Mapping[str, Any]) -> str | None:
    """The setting with this key in another section, or with the most similar key in this one."""
    for section, record in sections.items():
        if key in record.__struct_fields__:
            return f"{section}.{key}"
    near = nearest(key, sections[name].__struct_fields__)
    return near and f"{name}.{near}"


def _check_floats(config: Config) -> None:
    """Check that every float is 0 or a normal number of float32, in which devices compute."""
    for name, value in _values(config):
        if not isinstance(value, float):
            continue
        if not math.isfinite(value):
            raise ConfigError(f"{name}={value} is not finite: give a finite number.")
        if value and not _LEAST_FLOAT32 <= abs(value) <= _MOST_FLOAT32:
            raise ConfigError(
                f"{name}={value} is no number of float32, which is 0 or {_LEAST_FLOAT32:.2g} to "
                f"{_MOST_FLOAT32:.2g}: give one of these."
            )


def _check_paths(config: Config) -> None:
    for name, value in _values(config, of=LocalPath):
        check_local(name, value)
    for name, value in _values(config, of=AnyPath):
        check_path(name, value)
    for name, value in _values(config, of=StatePath):
        check_path(name, value, CHECKPOINT_STORES)


def _values(record: msgspec.Struct, of: Any = None, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of all settings, also of tables in lists; `of` selects one type."""
    hints = get_type_hints(type(record), include_extras=True)
    for field in record.__struct_fields__:
        value, name = getattr(record, field), f"{prefix}{field}"
        several = enumerate(value) if isinstance(value, tuple) else ()
        tables = {f"{name}[{i}].": v for i, v in several if isinstance(v, msgspec.Struct)}
        if isinstance(value, msgspec.Struct):
            tables[f"{name}."] = value
        elif of is None or without_rules(hints[field]) == of:
            yield name, value
        for within, table in tables.items():
            yield from _values(table, of, within)


def _check_values(tree: Mapping[str, Any], sections: Mapping[str, Any]) -> None:
    """Check that required values are present, and that values have their field's type and range."""
    for name, section in sections.items():
        given, hints = tree.get(name, {}), get_type_hints(section, include_extras=True)
        for field in msgspec.structs.fields(section):
            key = f"{name}.{field.name}"
            if field.name in given:
                check_value(key, given[field.name], without_rules(hints[field.name]))
            elif field.required and (name in tree or _is_required(name)):
                preset = ", or [model] a preset" * (name == "model")
                raise ConfigError(f"{key} is missing: give it a value{preset}.")


def _is_required(section: str) -> bool:
    return next(field.required for field in msgspec.structs.fields(Config) if field.name == section)
