"""Rules across settings: the command prints all, and some are of a run alone."""

from pathlib import Path

import pytest
from commands import SMALL

from jaxpipe import plan, train
from jaxpipe.planning.rules.listing import RULES, rules


def test_the_command_prints_every_rule(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        plan.main(["--rules"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[2:] == [f"| `[{section}]` | {rule} |" for section, rule in rules()]
    assert len(printed) > len(RULES)


def test_a_plan_needs_no_data_and_a_run_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(SMALL), "data.source=file", "parallel.pp=2", f"run.dir={tmp_path}"]
    assert plan.main(words) == 0
    assert train.main(words) == 2
    assert "data.source='file' needs data.path" in capsys.readouterr().err
