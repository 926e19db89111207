"""A run as a program of the user starts it."""

import re
from pathlib import Path

import pytest
from commands import SMALL, complete, losses

import jaxpipe
from jaxpipe.config import load
from jaxpipe.run import Run
from jaxpipe.runtime.exit_code import ExitCode

PAGE = Path(jaxpipe.__file__).parent / "run" / "README.md"
SHORT = ["train.steps=2", "checkpoint.every=0", "train.eval_every=0"]


def test_the_example_of_the_page_trains(tmp_path, capsys):
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    words = [f"run.dir={tmp_path}", *SHORT]
    code = code.replace('"configs/quickstart.toml"', repr(str(SMALL)))
    code = code.replace('["run.dir=runs/from_python"]', repr(words))
    with pytest.raises(SystemExit) as ended:
        exec(compile(code, str(PAGE), "exec"), {})
    printed = capsys.readouterr()
    assert ended.value.code == ExitCode.DONE, printed.err
    assert "parameters on Mesh(" in printed.out
    assert list(losses(tmp_path)) == [1, 2]
    assert complete(tmp_path) == [2]


def test_an_error_of_the_body_leaves_the_run_to_the_next_start(tmp_path):
    config = load(SMALL, [f"run.dir={tmp_path}", *SHORT])
    with pytest.raises(RuntimeError, match="of the user"), Run(config):
        raise RuntimeError("of the user")
    with Run(config) as run:
        state, seen = run.restore()
        assert (int(state.step), seen.samples) == (0, 0)
