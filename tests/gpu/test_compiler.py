"""The compile options: none on CPU, and on GPUs all that the installed XLA knows."""

import jax
import pytest

from jaxpipe.runtime import compiler
from jaxpipe.runtime.compiler import GPU, Option


@pytest.fixture(autouse=True)
def _no_flags(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)


def test_none_on_cpu():
    assert compiler.options("cpu") == compiler.options("tpu") == {}


def test_the_installed_xla_knows_every_option():
    options = compiler.options("gpu")  # a warning would be an error here
    assert set(options) == {option.name for option in GPU}
    assert options == compiler.options("cuda")
    jax.jit(lambda: 0, compiler_options=options).lower().compile()


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("xla_gpu_no_such_option", True, "No such compile option"),
        ("xla_gpu_enable_command_buffer", "FUSION,NO_SUCH_KIND", "not a valid enum value"),
        ("xla_gpu_experimental_parallel_collective_overlap_limit", "four", "not a valid"),
    ],
)
def test_what_xla_does_not_know_is_left_out_with_a_sentence(monkeypatch, name, value, why):
    own = (Option(name, (value,), "to see"), *GPU[:1])
    kept, (sentence,) = compiler.accepted(own)
    assert set(kept) == {GPU[0].name}
    assert sentence.startswith(name)
    assert why in sentence
    monkeypatch.setattr(compiler, "GPU", own)
    with pytest.warns(UserWarning, match=f"{name} is left out"):
        assert compiler.options("gpu") == kept


def test_the_first_known_value_is_taken():
    kinds = Option("xla_gpu_enable_command_buffer", ("NEW_KIND", "FUSION", "CUBLAS"), "to see")
    assert compiler.accepted([kinds]) == ({kinds.name: "FUSION"}, [])


def test_an_option_in_xla_flags_is_the_users(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--{GPU[0].name}=mine --other=1")
    assert set(compiler.options("gpu")) == {option.name for option in GPU[1:]}
