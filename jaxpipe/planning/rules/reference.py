"""The page of all settings, `jaxpipe/config/SETTINGS.md`: meaning, type, default and rules."""

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import NODEFAULT, Meta, Struct

from jaxpipe.config import Config, SourceConfig
from jaxpipe.config.rules import shown, without_rules
from jaxpipe.model import FAMILIES
from jaxpipe.model.family import INT32_MAX
from jaxpipe.planning.rules.listing import rules

_INTRODUCTION = """# Settings

`python -m jaxpipe.plan --settings` prints this page. A setting is given in its section of a TOML
file, or on the command line as `section.key=value`. A rule holds for a setting that differs from
its default."""
_BOUNDS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
_KINDS = {int: "integer", float: "number", bool: "true or false", str: "text"}


def settings_page() -> str:
    """Return the page: a table of every section, and of what each family of models adds."""
    of_setting: dict[str, list[str]] = {}
    for _, rule in rules():
        _, setting, _ = re.split(r"`([\w.]+)", rule, maxsplit=1)
        of_setting.setdefault(setting, []).append(rule)
    parts = [_INTRODUCTION]
    for section, record in _tables():
        heading, rows = (record.__doc__ or "").splitlines()[0], []
        comments, hints = _comments(record), get_type_hints(record, include_extras=True)
        for field in msgspec.structs.fields(record):
            if field.name in comments:
                name = f"{section}.{field.name}"
                default = "required" if field.default is NODEFAULT else _code(field.default)
                meaning = [comments[field.name], *of_setting.get(name, ())]
                cells = f"`{name}`", _words(without_rules(hints[field.name])), default
                rows.append(f"| {' | '.join(cells)} | {_paragraph(meaning)} |")
        if rows:
            titles = "| setting | type | default | meaning and rules |\n|---|---|---|---|"
            parts.append("\n".join([f"## {heading}", "", titles, *rows]))
    return "\n\n".join(parts)


def _tables() -> Iterator[tuple[str, type[Struct]]]:
    """Yield the sections and their records; of `[model]` every class that adds fields."""
    for section, record in get_type_hints(Config).items():
        if section != "model":
            yield section, record
            continue
        bases = [base for family in FAMILIES.values() for base in family.config.__mro__[::-1]]
        for base in dict.fromkeys(bases):
            if issubclass(base, Struct) and base is not Struct:
                yield section, base
    yield "data.sources", SourceConfig


def _comments(record: type[Struct]) -> dict[str, str]:
    """The comment on each field that a class declares: the lines above it, and within it."""
    source = inspect.getsource(record)
    found = {
        token.start[0]: (token.string.removeprefix("# "), not token.line[: token.start[1]].strip())
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and not token.string.startswith("# fmt:")
    }
    comments = {}
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    for node in definition.body:
        if not isinstance(node, ast.AnnAssign) or "ClassVar" in ast.unparse(node.annotation):
            continue
        first, last = node.lineno, node.end_lineno or node.lineno
        while found.get(first - 1, ("", False))[1]:
            first -= 1
        lines = (found[line][0] for line in range(first, last + 1) if line in found)
        comments[ast.unparse(node.target)] = " ".join(lines)
    return comments


def _words(hint: Any) -> str:
    """A type in words, with its range."""
    if get_origin(hint) is Annotated:
        metas = [meta for meta in hint.__metadata__ if isinstance(meta, Meta)]
        if any((meta.extra or {}).get("path") for meta in metas):
            return "path"
        ranges = [
            words.format(f"{bound:g}" if abs(bound) < 1e4 else bound)
            for meta in metas
            for name, words in _BOUNDS.items()
            if (bound := getattr(meta, name)) not in (None, INT32_MAX)
        ]
        return ", ".join([_words(hint.__origin__), *ranges])
    if get_origin(hint) in (Union, UnionType):
        return ", or ".join(map(_words, get_args(hint)))
    if get_origin(hint) is Literal:
        return ", ".join(map(_code, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"list of {_words(get_args(hint)[0])}"
    return _KINDS.get(hint, "table")


def _code(value: Any) -> str:
    """A value as TOML has it, as code."""
    return f"`{shown(value)}`"


def _paragraph(sentences: list[str]) -> str:
    """Sentences in a cell of a Markdown table; an empty one is left out."""
    words = " ".join(f"{sentence.removesuffix('.')}." for sentence in sentences if sentence)
    return words.replace("|", "\\|").replace("<", "&lt;")
