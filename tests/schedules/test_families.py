"""The registry of schedule families."""

from inspect import signature

import pytest

from jaxpipe.schedules import FAMILIES


@pytest.mark.parametrize("name", FAMILIES)
def test_the_record_has_the_builders_options(name):
    family = FAMILIES[name]
    _, _, *parameters = signature(family.builder).parameters.values()
    defaults = {parameter.name: parameter.default for parameter in parameters}
    assert (defaults.pop("target", None) is not None) == family.is_searched
    assert defaults == dict(family.options)
