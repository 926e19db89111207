"""The environment that is read before jax starts."""

import pytest

from jaxpipe.config import ConfigError
from jaxpipe.runtime.environment import GPU_MEMORY_SHARE, usable_share

FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def test_the_share_of_the_memory_that_jax_allocates(monkeypatch):
    monkeypatch.delenv(FRACTION, raising=False)
    assert usable_share() == float(GPU_MEMORY_SHARE)
    monkeypatch.setenv(FRACTION, ".5")
    assert usable_share() == 0.5


@pytest.mark.parametrize("text", ["90%", "", "0", "-1", "nan", "inf"])
def test_a_share_that_is_no_number_is_refused(text, monkeypatch):
    monkeypatch.setenv(FRACTION, text)
    with pytest.raises(ConfigError, match=f"{FRACTION}={text} is no number above 0, .*: unset it"):
        usable_share()
