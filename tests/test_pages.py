"""The pages that a reader follows, followed literally: their code runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parents[1]
LAYER_KIND = HOME / "jaxpipe" / "core" / "contract" / "ADD_A_LAYER_KIND.md"
YOUR_MODEL = HOME / "jaxpipe" / "flax_models" / "BRING_YOUR_MODEL.md"

# Claims of "Add a layer kind": results by the measures of the other tests; F stores the choice.
MORE = """
from compare import assert_same
from jaxpipe.core.contract import Context
from jaxpipe.core.split import POLICIES, split_layer

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


# "Bring your model": the loss falls below a tenth, and the modules have learned it.
LEARNED = """
assert losses[-1] < 0.1 * losses[0], losses
logits = pipeline.stage()(batch["inputs"][0])
assert (logits.argmax(-1) == batch["targets"][0]).mean() > 0.9
"""


def blocks(page, kind):
    """Return the page's code blocks of that kind, in order."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def run(folder, page, more):
    """Run the page's code and `more`; return what it prints."""
    program = folder / "page.py"
    program.write_text("\n\n".join([*blocks(page, "python"), more]))
    paths = os.pathsep.join(map(str, (HOME, HOME / "tests" / "support")))
    made = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True, text=True, timeout=600, cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    return made.stdout


def test_add_a_layer_kind_prints_what_it_says(tmp_path):
    assert run(tmp_path, LAYER_KIND, MORE) == "".join(blocks(LAYER_KIND, "text"))


@pytest.mark.extended
def test_bring_your_model_learns(tmp_path):
    assert run(tmp_path, YOUR_MODEL, LEARNED).startswith("loss ")
