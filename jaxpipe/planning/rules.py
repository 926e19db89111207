"""The rules across settings in words, collected from the docstrings of the checks."""

import inspect
import re

from jaxpipe.planning.checks import RULES


def rules() -> list[tuple[str, str]]:
    """Return the section and sentence of every rule, grouped by section.

    A rule is a paragraph of a check's docstring that begins with a setting, which gives the
    section.
    """
    found: dict[str, list[str]] = {}
    for check in RULES:
        for paragraph in (inspect.getdoc(check) or "").split("\n\n"):
            if setting := re.match(r"`(\w+)\.", paragraph):
                found.setdefault(setting[1], []).append(" ".join(paragraph.split()))
    return [(section, rule) for section, of_it in found.items() for rule in of_it]


def rules_table() -> str:
    """Return the rules as a table in Markdown."""
    rows = [f"| `[{section}]` | {rule} |" for section, rule in rules()]
    return "\n".join(["| section | rule |", "|---|---|", *rows])
