"""Print what pip shall install to test with other packages than those of `.venv`.

`python tests/support/versions.py oldest` prints the oldest versions that pyproject.toml allows;
`newest` asks for the newest there are, of jax also pre-releases; `outside` for those with which
tests compare.
"""

import re
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
_LEAST = re.compile(r"([\w.\-]+)(?:\[[^\]]*\])?>=([\d.]+)")


def pins(text, which):
    """Return arguments of pip for each dependency, including those for preparing data.

    >>> head = '[project]\\ndependencies = ["jax>=0.1,!=0.2"]\\n'
    >>> text = head + 'optional-dependencies.data = ["zip>=3"]'
    >>> pins(text, "oldest")
    ['jax==0.1', 'zip==3']
    >>> pins(text, "newest")
    ['--upgrade', 'jax>=0.dev0', 'zip']
    >>> pins(text + '\\noptional-dependencies.hf = ["torch>=2"]', "outside")
    ['jax>=0.1,!=0.2', 'zip>=3', 'torch>=2']
    """
    project = tomllib.loads(text)["project"]
    extras = project["optional-dependencies"]
    every = [*project["dependencies"], *extras["data"]]
    if which == "outside":
        return [*every, *extras["hf"]]
    bounds = [_LEAST.match(line).groups() for line in every]
    if which == "newest":
        # A bound that is a pre-release makes pip consider those of that package.
        return ["--upgrade", *(name + ">=0.dev0" * (name == "jax") for name, _ in bounds)]
    return [f"{name}=={least}" for name, least in bounds]


if __name__ == "__main__":
    print("\n".join(pins(PROJECT.read_text(), sys.argv[1])))  # noqa: T201
