"""Fixtures for tests of the launch scripts."""

import shutil

import pytest
from scripts import LAUNCH, PYTHON


@pytest.fixture
def tree(tmp_path):
    """Return a checkout of only the scripts, with a space in its name."""
    root = tmp_path / "a checkout"
    shutil.copytree(LAUNCH, root / "launch")
    (root / "pyproject.toml").touch()
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return root
