"""Every numeric key at absurd values: an error of one sentence or a sound run, and fast."""

import contextlib
import signal
from typing import get_args, get_type_hints

import msgspec
import pytest
from resolving import resolved

from jaxpipe.config import Config, ConfigError, SourceConfig, load
from jaxpipe.core.schedule import ScheduleError
from jaxpipe.model import FAMILIES

FILE = """
[model]
family = "{family}"
vocab_size = 64
n_layers = 2
d_model = 16
n_heads = 2
d_ff = 32
{more}
[train]
steps = 6
seq_len = 16
microbatch_size = 2
grad_accum_steps = 2
[data]
source = "dummy"
[runtime]
cpu_devices = 1
"""
_LATENT = """\
kv_lora_rank = 8
qk_nope_head_dim = 8
qk_rope_head_dim = 4
v_head_dim = 8
mtp_depth = 1
rope_scaling = "yarn"
rope_factor = 2.0
"""
_LOCAL = "n_kv_heads = 1\nsliding_window = 8\nglobal_every = 2\n"
MORE = {
    "llama": "n_kv_heads = 1", "gemma3": _LOCAL, "deepseek": _LATENT, "gpt2": "",
    "gpt_oss": f"{_LOCAL}n_experts = 4\nexperts_per_token = 2\n",
    "olmo2": "n_kv_heads = 1", "olmo3": _LOCAL, "glm4": "n_kv_heads = 1", "phi3": "n_kv_heads = 1",
    "seed_oss": "n_kv_heads = 1", "exaone4": _LOCAL,
    "engram": "n_kv_heads = 1\nngram_heads = 2\nngram_rows = 8\nngram_width = 4\n",
    "glm4_moe": "n_kv_heads = 1\nn_experts = 2\nexperts_per_token = 2\n",
    "ernie4_5_moe": "n_kv_heads = 1\nn_experts = 2\nexperts_per_token = 2\n",
    "minimax_m2": "n_kv_heads = 1\nn_experts = 2\nexperts_per_token = 2\n",
    "qwen3_next": "n_kv_heads = 1\nn_experts = 2\nexperts_per_token = 2\nattention_every = 2\n"
    "head_dim = 8\ndelta_key_heads = 1\ndelta_value_heads = 2\ndelta_key_dim = 8\n",
    "qwen3_5": "n_kv_heads = 1\nattention_every = 2\nhead_dim = 8\ndelta_key_heads = 1\n"
    "delta_value_heads = 2\ndelta_key_dim = 8\n",
    "bamba": "n_kv_heads = 1\nlayer_pattern = 'M*'\nhead_dim = 8\nmamba_heads = 2\n"
    "mamba_head_dim = 4\nmamba_state = 4\n",
    "granite_hybrid": "n_kv_heads = 1\nlayer_pattern = 'M*'\nhead_dim = 8\nmamba_heads = 2\n"
    "mamba_head_dim = 4\nmamba_state = 4\nn_experts = 2\nexperts_per_token = 2\n",
    "olmo_hybrid": "n_kv_heads = 1\nattention_every = 2\nhead_dim = 8\ndelta_key_heads = 1\n"
    "delta_value_heads = 2\ndelta_key_dim = 8\n",
    "nemotron_h": "n_kv_heads = 1\nlayer_pattern = 'ME'\nn_experts = 2\nexperts_per_token = 2\n"
    "head_dim = 8\nmamba_heads = 2\nmamba_head_dim = 4\nmamba_groups = 1\nmamba_state = 4\n",
    "deepseek_v4": "head_dim = 8\nqk_rope_head_dim = 4\nq_lora_rank = 8\no_groups = 1\n"
    "o_lora_rank = 8\nn_experts = 2\nexperts_per_token = 2\nrope_original_positions = 8\n",
    "kimi_linear": "kv_lora_rank = 8\nqk_nope_head_dim = 8\nqk_rope_head_dim = 4\nv_head_dim = 8\n"
    "n_experts = 2\nexperts_per_token = 2\nattention_every = 2\ndelta_heads = 2\n"
    "delta_head_dim = 8\n",
    "llama4": "n_kv_heads = 1\nn_experts = 2\nattention_chunk = 8\nnope_every = 2\n",
}  # fmt: skip
VALUES = ["-1", "0", "1000000000000", "1000000000000000000", "1e18", "1e-60", "1e60", "nan",
          "inf", "2147483647", "1" + 400 * "0"]  # fmt: skip
FEW = ["-1", "0", "nan", "1e60"]  # of a key that another family's case has tried with all


def numeric(record):
    """Yield the names of the numeric fields."""
    for name, hint in get_type_hints(record).items():
        if name in record.__struct_fields__ and {int, float} & {hint, *get_args(hint)}:
            yield name


def keys():
    """Yield families, keys and values."""
    for section, record in get_type_hints(Config).items():
        if section != "model":
            yield from (("llama", f"{section}.{name}", VALUES) for name in numeric(record))
    seen = set()
    for family in MORE:
        for name in numeric(FAMILIES[family].config):
            yield family, f"model.{name}", FEW if name in seen else VALUES
            seen.add(name)


@contextlib.contextmanager
def at_most(seconds):
    def stop(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("configs")
    for family, more in MORE.items():
        (folder / family).write_text(FILE.format(family=family, more=more))
    return folder


def test_all_families_and_many_keys_are_tried():
    assert MORE.keys() == FAMILIES.keys()
    tried = {key for _, key, _ in keys()}
    assert {"train.seq_len", "optimizer.lr", "parallel.memory_limit", "model.d_ff"} <= tried
    assert len(tried) > 80


@pytest.mark.parametrize("family", MORE)
def test_ordinary_values_are_accepted(files, family):
    resolved(load(files / family), count=1)


@pytest.mark.extended(unless=["llama-*"])
@pytest.mark.parametrize(
    ("family", "key", "values"), list(keys()), ids=lambda one: one if isinstance(one, str) else ""
)
def test_an_extreme_value_is_answered_at_once(files, family, key, values):
    for value in values:
        with at_most(5):
            try:
                config = load(files / family, [f"{key}={value}"])
                resolved(config, count=1)
            except (ConfigError, ScheduleError):
                continue
        # Accepted: a number that devices can represent.
        section, name = key.split(".")
        held = getattr(getattr(config, section), name)
        if not isinstance(held, str):
            assert abs(held) < 2**32 if isinstance(held, int) else abs(held) < 3.5e38


@pytest.mark.parametrize("value", ["nan", "1e60", "-1", "1" + 400 * "0"])
def test_weights_of_sources_are_numbers_too(files, value):
    with pytest.raises(ConfigError, match=r"data.sources(\[0\])?"):
        load(files / "llama", [f"data.sources=[{{path='a', weight={value}}}]"])
    assert "weight" in {field.name for field in msgspec.structs.fields(SourceConfig)}
