"""`launch/test.sh --near`: the test files that can reach a file by imports, nearest first."""

from pathlib import Path

import pytest
from near import ROOT, defining_file, main, nearest_tests

JAXPIPE, TESTS = ROOT / "jaxpipe", ROOT / "tests"


def test_tests_of_the_own_package_come_first():
    found = nearest_tests([JAXPIPE / "core" / "executor" / "tick.py"])
    assert {path.parent for path in found[:10]} == {TESTS / "core" / "executor"}
    assert TESTS / "training" / "test_loop.py" in found
    assert not any(TESTS / "core" / "schedule" in path.parents for path in found)


def test_a_helper_is_reached_as_a_module_is():
    assert TESTS / "test_near.py" in nearest_tests([TESTS / "support" / "near.py"])
    assert nearest_tests([TESTS / "test_near.py"]) == [TESTS / "test_near.py"]


def test_a_name_that_a_package_re_exports_is_its_modules():
    assert defining_file("jaxpipe.core.schedule", "lower") == JAXPIPE / "core/schedule/lower.py"
    assert defining_file("jaxpipe.core", "schedule") == JAXPIPE / "core/schedule/__init__.py"
    assert defining_file("numpy", "array") is None


def test_who_imports_by_way_of_a_package_reaches_the_packages_file():
    package = JAXPIPE / "core" / "schedule" / "__init__.py"
    assert TESTS / "core" / "schedule" / "test_lower.py" in nearest_tests([package])


@pytest.mark.parametrize("name", ["README.md", "jaxpipe/core/none.py"])
def test_a_file_without_tests_is_refused(name, capsys):
    assert main([str(ROOT / name)]) == 2
    assert Path(name).name + ": no test reaches it" in capsys.readouterr().err
