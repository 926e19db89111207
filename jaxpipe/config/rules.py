"""Rules between settings, declared in the type of the setting that they guard.

    spike_window: Annotated[int, Meta(ge=2), read_with("train.spike_sigma")] = 128

A rule holds for a setting that differs from its default, or, with `when`, that has this value. A
rule that fits none of these forms is a function in `jaxpipe.planning.rules`.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

from msgspec import Struct, to_builtins
from msgspec.structs import fields
from msgspec.structs import replace as with_fields

from jaxpipe.config.errors import ConfigError

CUSTOM = "module:function"  # among a rule's values: any function of the user
_CHANGED = object()  # in place of a value of `when`: any but the default
_OFF = (0, "", (), "none")
_UNREAD = ("is read only with", "is not read with")
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "must be a multiple of": lambda value, bound: value % bound == 0,
    "must divide": lambda value, bound: bound % value == 0,
    "must be at most": lambda value, bound: value <= bound,
}
Record = TypeVar("Record", bound=Struct)


@dataclass(frozen=True)
class _Relation:
    """A setting depends on another one: that it is on, has some value, or is above a number.

    Attributes:
      verb: how it depends on that.
      is_wanted: whether the other setting must fulfil the condition; False: it must not.
      other: the other setting, "section.key".
      values: the condition: one of these values; none: any that is not `_OFF`.
      above: the condition: more than this number; None: `values` count.
      when: value of the guarded setting to which the rule applies.
      why: the reason, as a clause.
    """

    verb: str
    is_wanted: bool
    other: str
    values: tuple[Any, ...]
    above: float | None
    when: Any = _CHANGED
    why: str = ""

    def fault(self, name: str, value: Any, default: Any, config: Struct) -> str:
        """The error of a value that breaks the rule; "" if it keeps it."""
        applies = value != default if self.when is _CHANGED else value == self.when
        if not applies or self._holds(now := _value(config, self.other)) == self.is_wanted:
            return ""
        why = f"{self.why}; " if self.why else ""
        instead = f"leave {name} at its default, {shown(default)}"  # also where a file changed it
        if not self.is_wanted:
            return (
                f"{name}={shown(value)} {self.verb} {self.other}={shown(now)}: {why}"
                f"{instead}, or change {self.other}."
            )
        verb, wanted = "set" if self.above is None else "raise", self.other
        wanted += f"={shown(self.values[0])}" if self.values else ""
        return (
            f"{name}={shown(value)} {self.verb} {self._condition()}, but {self.other} is "
            f"{shown(now)}: {why}{verb} {wanted}, or {instead}."
        )

    def sentence(self, name: str) -> str:
        """The rule in Markdown."""
        guarded = name if self.when is _CHANGED else f"{name}={shown(self.when)}"
        return f"`{guarded}` {self.verb} {self._condition('`')}{self.why and f': {self.why}'}."

    def _holds(self, value: Any) -> bool:
        if self.above is not None:
            return value > self.above
        if not self.values:
            return value not in _OFF
        return value in self.values or (CUSTOM in self.values and ":" in str(value))

    def _condition(self, quote: str = "") -> str:
        if self.above is not None:
            return f"{quote}{self.other}{quote} above {self.above:g}"
        cases = [f"{self.other}={shown(value)}" for value in self.values] or [self.other]
        return " or ".join(f"{quote}{case}{quote}" for case in cases)


@dataclass(frozen=True)
class _Bound:
    """A number compares with the product of other settings, unless one of them is not known.

    A value below 0 is not known yet (`parallel.dp=-1`), and a product of 0 is no bound.
    """

    verb: str
    others: tuple[str, ...]
    why: str

    def fault(self, name: str, value: Any, default: Any, config: Struct) -> str:
        """The error of a value that breaks the rule; "" if it keeps it."""
        numbers = {other: _value(config, other) for other in self.others}
        bound = math.prod(numbers.values())
        if value < 0 or bound <= 0 or _COMPARISONS[self.verb](value, bound):
            return ""
        product = " x ".join(f"{other}={number}" for other, number in numbers.items())
        why = f"{self.why}; " if self.why else ""
        return f"{name}={value} {self.verb} {product}: {why}change one of them."

    def sentence(self, name: str) -> str:
        """The rule in Markdown."""
        product = " x ".join(f"`{other}`" for other in self.others)
        return f"`{name}` {self.verb} {product}{self.why and f': {self.why}'}."


@dataclass(frozen=True)
class _Package:
    """A setting needs a package, which pip installs by the words `install`."""

    package: str
    install: str
    verb: str = "needs"

    def fault(self, name: str, value: Any, default: Any, config: Struct) -> str:
        """The error where the package is missing; "" if it is there, or not needed."""
        # A folder of this name, such as wandb writes its logs to, is also found, without an origin.
        if value == default or ((spec := find_spec(self.package)) and spec.origin):
            return ""
        return (
            f"{name}={shown(value)} needs the package {self.package}, which is not installed: pip "
            f"install {self.install}, or leave {name} at its default, {shown(default)}."
        )

    def sentence(self, name: str) -> str:
        """The rule in Markdown."""
        return f"`{name}` needs the package {self.package}."


_Rule = _Relation | _Bound | _Package


def needs(
    other: str, *values: Any, above: float | None = None, when: Any = _CHANGED, why: str = ""
) -> _Relation:
    """A setting works only where `other` is on, has one of `values`, or is `above` a number."""
    return _Relation("needs", True, other, values, above, when, why)


def read_with(other: str, *values: Any, above: float | None = None, why: str = "") -> _Relation:
    """A setting is read only where `other` is on, has one of `values`, or is `above` a number."""
    return _Relation("is read only with", True, other, values, above, why=why)


def excludes(
    other: str, *values: Any, above: float | None = None, when: Any = _CHANGED, why: str = ""
) -> _Relation:
    """A setting fails where `other` is on, has one of `values`, or is `above` a number."""
    return _Relation("excludes", False, other, values, above, when, why)


def unread_with(other: str, *values: Any, why: str = "") -> _Relation:
    """A setting is not read where `other` is on, or has one of `values`."""
    return _Relation("is not read with", False, other, values, None, why=why)


def multiple_of(*others: str, why: str = "") -> _Bound:
    """A number is a multiple of the product of others."""
    return _Bound("must be a multiple of", others, why)


def divides(*others: str, why: str = "") -> _Bound:
    """A number divides the product of others."""
    return _Bound("must divide", others, why)


def at_most(*others: str, why: str = "") -> _Bound:
    """A number is at most the product of others."""
    return _Bound("must be at most", others, why)


def needs_package(package: str, install: str = "") -> _Package:
    """A setting works only where a package is installed, by `pip install` and `install`."""
    return _Package(package, install or package)


def check_rules(config: Struct) -> None:
    """Raise `ConfigError` at the first declared rule that a configuration breaks."""
    for _, _, _, fault in _faults(config):
        raise ConfigError(fault)


def without_unread(config: Record) -> Record:
    """The configuration with the default of every setting that nothing would read."""
    for section, key, rule, _ in _faults(config):
        if rule.verb in _UNREAD:
            record = getattr(config, section)
            default = next(field.default for field in fields(record) if field.name == key)
            changed = with_fields(record, **{key: default})
            return without_unread(with_fields(config, **{section: changed}))
    return config


def declared_rules(section: str, record: type[Struct]) -> dict[str, list[str]]:
    """The rules of each setting of a section's record in Markdown, by key."""
    rules: dict[str, list[str]] = {}
    for key, _, rule in _rules(record):
        rules.setdefault(key, []).append(rule.sentence(f"{section}.{key}"))
    return rules


def without_rules(hint: Any) -> Any:
    """The type of a setting without its rules."""
    if get_origin(hint) is not Annotated:
        return hint
    kept = [more for more in hint.__metadata__ if not isinstance(more, _Rule)]
    return Annotated[(hint.__origin__, *kept)] if kept else hint.__origin__


def _faults(config: Struct) -> Iterator[tuple[str, str, _Rule, str]]:
    """Yield section and key of every setting that breaks a rule, the rule, and its error."""
    for section in config.__struct_fields__:
        record: Struct = getattr(config, section)
        for key, default, rule in _rules(type(record)):
            fault = rule.fault(f"{section}.{key}", getattr(record, key), default, config)
            if fault:
                yield section, key, rule, fault


@cache  # msgspec and typing evaluate all annotations of the class
def _rules(record: type[Struct]) -> tuple[tuple[str, Any, _Rule], ...]:
    """Key, default and rule of every declared rule of a section's record."""
    hints = get_type_hints(record, include_extras=True)
    return tuple(
        (field.name, field.default, rule)
        for field in fields(record)
        for rule in getattr(hints[field.name], "__metadata__", ())
        if isinstance(rule, _Rule)
    )


def _value(config: Struct, name: str) -> Any:
    """The value of a setting; 0 of a field that this family of models does not have."""
    section, key = name.split(".")
    return getattr(getattr(config, section), key, 0)


def shown(value: Any) -> str:
    """A value as it is written in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    plain = to_builtins(value)
    return repr(list(plain) if isinstance(plain, tuple) else plain)
