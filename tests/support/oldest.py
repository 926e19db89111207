"""Print the oldest versions of jaxpipe's dependencies that pyproject.toml allows, for pip."""

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
_LEAST = re.compile(r"([\w.\-]+)(?:\[[^\]]*\])?>=([\d.]+)")


def pins(text):
    """Return `name==version` of each dependency, including those for preparing data.

    >>> head = '[project]\\ndependencies = ["jax>=0.1,!=0.2"]\\n'
    >>> pins(head + 'optional-dependencies.data = ["zip>=3"]')
    ['jax==0.1', 'zip==3']
    """
    project = tomllib.loads(text)["project"]
    every = [*project["dependencies"], *project["optional-dependencies"]["data"]]
    return ["{}=={}".format(*_LEAST.match(line).groups()) for line in every]


if __name__ == "__main__":
    print("\n".join(pins(PROJECT.read_text())))  # noqa: T201
