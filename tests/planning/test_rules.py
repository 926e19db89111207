"""Rules across settings: the command prints all, and some are of a run alone."""

import re
from pathlib import Path
from typing import get_type_hints

import pytest
from commands import SMALL

import jaxpipe
from jaxpipe import plan, train
from jaxpipe.config import Config
from jaxpipe.model import FAMILIES
from jaxpipe.planning.rules.listing import RULES, rules

PAGE = Path(jaxpipe.__file__).parent / "config" / "SETTINGS.md"


def test_the_command_prints_every_rule(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        plan.main(["--rules"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[2:] == [f"| `[{section}]` | {rule} |" for section, rule in rules()]
    assert len(printed) > len(RULES)


def test_the_page_of_settings_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        plan.main(["--settings"])
    command = "python -m jaxpipe.plan --settings > jaxpipe/config/SETTINGS.md"
    assert capsys.readouterr().out == PAGE.read_text(), f"write it anew: {command}"


def test_the_page_has_every_setting_with_its_rules() -> None:
    page = PAGE.read_text()
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.*)$", page, re.MULTILINE))
    sections = get_type_hints(Config)
    for section in sections.keys() - {"model"}:
        assert {f"{section}.{key}" for key in sections[section].__struct_fields__} <= rows.keys()
    for family in FAMILIES.values():
        assert {f"model.{key}" for key in family.config.__struct_fields__} <= rows.keys()
    assert rows["train.spike_limit"] == (
        "integer, at least 0 | `8` | most consecutive steps to skip, counted from a spike on; at "
        "one more the run rolls back or stops. `train.spike_limit` is read only with "
        "`train.spike_sigma`. |"
    )
    for _, rule in rules():
        assert rule.replace("<", "&lt;") in page


def test_a_plan_needs_no_data_and_a_run_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(SMALL), "data.source=file", "parallel.pp=2", f"run.dir={tmp_path}"]
    assert plan.main(words) == 0
    assert train.main(words) == 2
    assert "data.source='file' needs data.path" in capsys.readouterr().err
