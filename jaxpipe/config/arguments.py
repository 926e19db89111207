"""The command line shared by commands that take a configuration: its parser and its errors."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn, get_type_hints

from jaxpipe.config.errors import ConfigError
from jaxpipe.config.foreign import meaning
from jaxpipe.config.paths import any_path, examples
from jaxpipe.config.secrets import mask_secrets
from jaxpipe.config.sections import Config
from jaxpipe.model import FAMILIES, ModelConfig

SETTINGS = (
    "settings, in TOML syntax, that override those of the file, such as train.steps=20 "
    "parallel.schedule=gpipe; `python -m jaxpipe.train CONFIG --print-config` lists all with their "
    "values, and `python -m jaxpipe.plan --settings` with their meanings; relative paths start at "
    "the current directory"
)


MODEL = "a run's directory, one of its checkpoints, or a model's directory from Hugging Face"


class Parser(argparse.ArgumentParser):
    """argparse's parser, with the secrets of addresses masked in its errors."""

    def error(self, message: str) -> NoReturn:
        """End the process with a message."""
        super().error(mask_secrets(message))


def parser_of(
    command: str,
    doc: str,
    example: str = "quickstart",
    paths: Mapping[str, str] | None = None,
) -> Parser:
    """A parser with the arguments CONFIG and section.key=value.

    Args:
      command: name of the module below `jaxpipe`.
      doc: docstring of the command's module; its last paragraph, the exit codes, ends the help.
      example: the example configuration to name in the help.
      paths: paths to take instead of CONFIG: what each is, by name.
    """
    about, _, codes = doc.strip().rpartition("\n\n")
    parser = Parser(
        prog=f"python -m jaxpipe.{command}", description=about, epilog=codes, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    for name, what in (paths or {}).items():
        parser.add_argument(name, type=any_path, metavar=name.upper(), help=what)
    if not paths:
        near = examples() / f"{example}.toml"
        parser.add_argument("config", metavar="CONFIG", help=f"a TOML file, such as {near}")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help=SETTINGS
    )
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse `argv` (None: `sys.argv`).

    Raises:
      ConfigError: an option is unknown; the message names the setting that may be meant.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    arguments, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        word = unknown[0]
        raise ConfigError(f"{word} is no option of this command{_meant(word, argv)}.")
    return arguments


def parse_commands(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, words: str
) -> argparse.Namespace:
    """Parse `argv` (None: `sys.argv`) of a command with subcommands.

    argparse matches a `*` positional with nothing once an option precedes it: what is left of the
    arguments is added to the positional `words`, of those subcommands that have it.
    """
    arguments, more = parser.parse_known_args(argv)
    if more and (words not in arguments or any(word.startswith("-") for word in more)):
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    if more:
        setattr(arguments, words, [*getattr(arguments, words), *more])
    return arguments


def string_override(key: str, text: str) -> str:
    """The override that sets a string, also one that is a number or a date in TOML."""
    return f"{key}={json.dumps(text, ensure_ascii=False)}"


def _meant(word: str, argv: Sequence[str]) -> str:
    """Advice on an unknown option: how to write the setting of that name, or --help."""
    name, _, value = word.lstrip("-").partition("=")
    after = argv[argv.index(word) + 1 :] if word in argv else []
    value = value or next(iter(after), "VALUE")
    records = get_type_hints(Config) | {"model": FAMILIES[ModelConfig.DEFAULT].config}
    for section, record in records.items():
        for key in record.__struct_fields__:
            if name.replace("-", "_") in (key, f"{section}.{key}"):
                return f": a setting is given without dashes, as {section}.{key}={value}"
    if here := meaning("", name):
        return f": other trainers' {name} is the setting {here}, given as section.key=value"
    return ": --help lists them, and a setting is given without dashes, as train.steps=20"
