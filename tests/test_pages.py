"""The page "Add a layer kind", followed literally: its code runs with the printed results."""

import os
import re
import subprocess
import sys
from pathlib import Path

HOME = Path(__file__).parents[1]
PAGE = HOME / "jaxpipe" / "contract" / "ADD_A_LAYER_KIND.md"

# Claims of the page: results by the measures of the other tests; F stores the choice.
MORE = """
from compare import assert_same
from jaxpipe.contract import Context
from jaxpipe.pipeline import POLICIES, split_layer

for got in runs.values():
    assert_same(got, want)
rows = jax.tree.map(lambda leaf: leaf[0], batch)
kind = kinds(len(ORDER), 1)["routed"]
given = layers[1], embed(shared, rows), Context(rows, jnp.int32(1), None, variables)

def stored_integers(keep):
    kept = split_layer(kind.layer, *given, POLICIES["full"], keep).residuals
    leaves = (*kept.for_b, *kept.for_w)
    return [leaf.shape for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.integer)]

assert stored_integers(kind.keep) == [(4, 6)]
assert stored_integers(()) == []
"""


def blocks(kind):
    """Return the page's code blocks of that kind, in order."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_page_runs_and_prints_what_it_says(tmp_path):
    program = tmp_path / "layer_kind.py"
    program.write_text("\n\n".join([*blocks("python"), MORE]))
    paths = os.pathsep.join(map(str, (HOME, HOME / "tests" / "support")))
    made = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True, text=True, timeout=600, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert made.stdout == "".join(blocks("text"))
