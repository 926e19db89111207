"""The rules across settings: each check states its own, and a command prints all of them."""

import ast
import inspect
import pkgutil
import re
from importlib import import_module

import pytest

from jaxpipe import planning
from jaxpipe.plan import main
from jaxpipe.planning.rules import RULES, rules

CHECKS = [
    *(
        f"jaxpipe.planning.{module.name}"
        for module in pkgutil.iter_modules(planning.__path__)
        if module.name.endswith("checks")
    ),
    "jaxpipe.model.family",
    "jaxpipe.model.decoder_config",
    "jaxpipe.model.moe.config",
    "jaxpipe.model.llama.config",
    "jaxpipe.model.llama4.config",
    "jaxpipe.model.gpt2.config",
]
# of train --record-routes, and of a run but not of a plan
OF_OPTIONS = {"check_recording", "check_data_given"}


def refusals(function: ast.FunctionDef) -> int:
    """Return the number of sentences that a check can raise or yield."""
    given = []
    for node in ast.walk(function):
        match node:
            case ast.Yield(value=sentence):
                given.append(sentence)
            case ast.Raise(exc=ast.Call(func=ast.Name(id="ConfigError"), args=[sentence])):
                given.append(sentence)
    return sum(isinstance(sentence, ast.Constant | ast.JoinedStr) for sentence in given)


def stated(function: ast.FunctionDef) -> int:
    """Return the number of rules that its docstring states."""
    paragraphs = (ast.get_docstring(function) or "").split("\n\n")
    return sum(bool(re.match(r"`\w+\.", paragraph)) for paragraph in paragraphs)


@pytest.mark.parametrize("module", CHECKS)
def test_a_check_states_a_rule_for_every_refusal(module: str) -> None:
    listed = {(check.__module__, check.__name__) for check in RULES}
    tree = ast.parse(inspect.getsource(import_module(module)))
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef) or function.name in OF_OPTIONS:
            continue
        assert stated(function) >= refusals(function), function.name
        assert not stated(function) or (module, function.name) in listed, function.name


def test_the_command_prints_every_rule(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--rules"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[2:] == [f"| `[{section}]` | {rule} |" for section, rule in rules()]
    assert len(printed) > len(RULES)
