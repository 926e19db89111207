"""The extras for GPUs fit the installed jax, by the packages' own metadata."""

import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from versions import pins

pytestmark = pytest.mark.versions

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def of_project():
    """Return the project's requirements, and those of each extra."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    return project["dependencies"], project["optional-dependencies"]


def named(lines, name):
    (found,) = [one for one in map(Requirement, lines) if one.name == name]
    return found


@pytest.mark.parametrize("extra", ["cuda13", "aot"])
def test_an_extra_takes_the_same_jax(extra):
    dependencies, extras = of_project()
    assert named(extras[extra], "jax").specifier == named(dependencies, "jax").specifier
    assert version("jax") in named(dependencies, "jax").specifier


@pytest.mark.parametrize("extra", ["cuda13", "cuda13-local"])
def test_jax_asks_for_a_plugin_of_its_own_version(extra):
    """The plugin of `jaxpipe[cuda13]` brings CUDA itself; that of `[aot]` does not."""
    every = [one for one in map(Requirement, requires("jax")) if one.marker]
    of_extra = [one for one in every if one.marker.evaluate({"extra": extra})]
    plugin = next(one for one in of_extra if one.name == "jax-cuda13-plugin")
    assert ("with-cuda" in plugin.extras) == (extra == "cuda13")
    assert version("jax") in plugin.specifier
    assert not plugin.specifier.contains("0.9.0")
    jaxlib = next(one for one in map(Requirement, requires("jax")) if one.name == "jaxlib")
    assert version("jaxlib") in jaxlib.specifier


def test_the_installed_plugin_is_one_that_jax_takes():
    """And its cuDNN and compilers are those that `[aot]` allows."""
    try:
        plugin, pjrt = version("jax-cuda13-plugin"), version("jax-cuda13-pjrt")
    except PackageNotFoundError:
        pytest.skip("needs jaxpipe[aot]")
    assert plugin == pjrt == version("jaxlib")
    _, extras = of_project()
    brought = {}
    for line in [*requires("jax-cuda13-plugin"), *(requires("jax-cuda13-pjrt") or ())]:
        brought.setdefault(Requirement(line).name, Requirement(line).specifier)
    ours = [one for one in map(Requirement, extras["aot"]) if one.name.startswith("nvidia-")]
    assert ours
    for one in ours:
        held = version(one.name)
        assert held in one.specifier
        assert held in brought.get(one.name, one.specifier)


def test_the_oldest_versions_are_allowed():
    """Every dependency names its oldest version; that of jax is not an excluded one."""
    dependencies, extras = of_project()
    oldest = dict(pin.split("==") for pin in pins(PROJECT.read_text(), "oldest"))
    assert len(oldest) == len(dependencies) + len(extras["data"])
    for line in [*dependencies, *extras["data"]]:
        one = Requirement(line)
        assert oldest[one.name] in one.specifier
