"""A family is one record: a new one trains, is planned, saved and read without other changes."""

import json
import tomllib

import jax
import numpy as np
import pytest
from resolving import resolved
from tiny import TINY, TinyConfig

from jaxpipe import config as configs
from jaxpipe.config import ConfigError
from jaxpipe.model import FAMILIES
from jaxpipe.plan import main as plan
from jaxpipe.planning.cost.costs import costs_of
from jaxpipe.train import main as train

RUN = """
[model]
family = "tiny"
n_layers = 4
d_model = 16
vocab_size = 256
[parallel]
pp = 2
[train]
steps = 3
grad_accum_steps = 4
microbatch_size = 1
seq_len = 16
[optimizer]
decay = "constant"
[data]
source = "dummy"
[log]
tensorboard = false
"""


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(FAMILIES, "tiny", TINY)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(RUN)
    return path


def test_it_is_read_and_written(file):
    config = configs.load(file, ["model.widen=3"])
    assert config.model == TinyConfig(
        family="tiny", n_layers=4, d_model=16, vocab_size=256, widen=3
    )
    assert config.model.resolved() == config.model
    assert not config.model.tied
    again = configs.from_builtins(tomllib.loads(configs.to_toml(config)))
    assert again == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.n_heads=2", "unknown key model.n_heads"),
        ("model.family=large", "unknown model.family='large': use one of llama, "),
        ("model.preset=llama3_8b", "is of the family 'llama', but model.family='tiny'"),
        ("parallel.tp=2", "devices cannot share a tiny layer"),
        (
            "parallel.dp=2 parallel.cp=2 parallel.cp_method=ring",
            "by parallel.cp_method=gather alone in models of the family 'tiny'",
        ),
        (
            "train.compute_dtype=bfloat16 train.fp8=delayed",
            "train.fp8='delayed' is not for models of the family 'tiny'",
        ),
    ],
)
def test_what_it_does_not_have_is_refused(file, override, message):
    with pytest.raises(ConfigError) as error:
        resolved(configs.load(file, override.split()))
    assert message in str(error.value)


def test_it_needs_nothing_of_a_device(file):
    resolved(configs.load(file), platform="gpu")


def test_its_costs_are_those_of_its_kinds(file):
    costs = costs_of(configs.load(file))
    assert costs.order == ("narrow", "wide", "narrow", "wide")
    narrow, wide = costs.kinds["narrow"], costs.kinds["wide"]
    assert narrow.F == 2 * 2 * 16 * 16 * 16
    assert (wide.F, wide.B, wide.W) == (2 * narrow.F, 2 * narrow.B, 2 * narrow.W)
    assert plan([str(file)]) == 0


@pytest.mark.slow
def test_it_trains_and_goes_on_under_another_mesh(file, tmp_path):
    def losses(directory, *overrides):
        assert train([str(file), f"run.dir={directory}", *overrides]) == 0
        lines = (directory / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    eight = ["parallel.dp=4", "train.microbatch_size=1"]
    whole = losses(tmp_path / "whole", "train.steps=4", *eight)
    losses(tmp_path / "parts", "train.steps=2", *eight)
    other = ["parallel.pp=4", "parallel.dp=2", "parallel.schedule=zb_h1", "train.microbatch_size=2"]
    parts = losses(tmp_path / "parts", "train.steps=4", *other)
    assert whole[3] < whole[0]
    np.testing.assert_allclose(parts, whole, rtol=1e-6)
    assert len(jax.devices()) == 8


def test_documents_that_it_does_not_keep_apart_cannot_share_a_row(file):
    with pytest.raises(ConfigError, match="documents of a packed row see each other in .* 'tiny'"):
        resolved(configs.load(file, ["data.packing=best_fit"]))
