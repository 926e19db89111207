"""The front page of the core: its program runs as it stands, and prints what the page says."""

import os
import re
import subprocess
import sys
from pathlib import Path

HOME = Path(__file__).parents[2]


def test_the_program_of_the_page(tmp_path):
    text = (HOME / "jaxpipe" / "core" / "README.md").read_text()
    program, printed = (
        re.search(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1]
        for kind in ("python", "text")
    )
    made = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(HOME), "JAX_PLATFORMS": "cpu"}, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    cut = printed.rindex(" differ by")  # the rest depends on the processor
    assert made.stdout[:cut] == printed[:cut]


def test_names_of_the_core_are_loaded_when_used():
    code = (
        "import sys, jaxpipe.core as core; core.zb_h1(pp=2, microbatches=2); core.StageFunctions;"
        "assert 'jax' not in sys.modules; [getattr(core, name) for name in core.__all__]"
    )
    subprocess.run([sys.executable, "-c", code], cwd=HOME, check=True)
