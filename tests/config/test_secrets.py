"""Secrets in addresses are not in what a run keeps or shows."""

import tomllib

import pytest
from commands import SMALL
from msgspec.structs import replace

from jaxpipe import train
from jaxpipe.bench import main as bench
from jaxpipe.checkpoint.__main__ import main as checkpoint
from jaxpipe.config import ConfigError, load, mask_secrets, to_builtins, to_toml
from jaxpipe.config.files import SourceConfig
from jaxpipe.config.paths import check_path
from jaxpipe.config.secrets import has_mask
from jaxpipe.data.__main__ import main as data


@pytest.mark.parametrize(
    ("given", "masked"),
    [
        ("http://user:pw@host/tok", "http://***@host/tok"),
        ("https://token@host:80/x", "https://***@host:80/x"),
        ("s3://KEY:se/cr+et@bucket/a", "s3://***@bucket/a"),
        ("ftp://u:p@ss@host/x", "ftp://***@host/x"),
        ("simplecache::http://u:p@h/x", "simplecache::http://***@h/x"),
        ("http://h/x?token=abc&x=1#f", "http://h/x?token=***&x=***#f"),
        ("http://u:1234@h:80/x?sig=a%2Fb", "http://***@h:80/x?sig=***"),
        ("'http://u:p@h/x' and http://v:q@i", "'http://***@h/x' and http://***@i"),
    ],
)
def test_a_secret_is_masked(given, masked):
    assert mask_secrets(given) == masked
    assert mask_secrets({"a": [given, 1]}) == {"a": [masked, 1]}
    assert mask_secrets(masked) == masked
    assert has_mask(masked)
    assert str(ConfigError(f"cannot read {given} now")) == f"cannot read {masked} now"


@pytest.mark.parametrize(
    "text",
    ["hf://datasets/org/name@rev/f", "http://host:8080/a@b", "gs://bucket/run", "me@host:a=1?b=2"],
)
def test_other_texts_stay(text):
    assert mask_secrets(text) == text
    assert not has_mask(text)


def test_every_setting_is_masked_where_it_is_kept():
    config, secret = load(SMALL), "http://me:Passw0rd@host/a?sig=T0ken"
    data = replace(
        config.data, path=secret, heldout_path=secret, sources=(SourceConfig(path=secret),)
    )
    config = replace(
        config, data=data, lora=replace(config.lora, adapter=secret),
        checkpoint=replace(config.checkpoint, resume=secret), run=replace(config.run, dir=secret),
    )  # fmt: skip
    for kept in (to_toml(config), str(to_builtins(config))):
        assert "Passw0rd" not in kept
        assert "T0ken" not in kept
    assert tomllib.loads(to_toml(config))["data"]["path"] == "http://***@host/a?sig=***"


def test_a_masked_address_is_refused():
    with pytest.raises(ConfigError, match=r"data.path='http://\*\*\*@host/a' has \*\*\* where"):
        check_path("data.path", "http://***@host/a")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (train.main, ["--status", "no://{}host/run"]),
        (data, ["inspect", "no://{}host/tokens"]),
        (checkpoint, ["inspect", "no://{}host/run"]),
        (bench, ["no://{}host/x"]),
    ],
)
def test_an_argument_that_is_refused_is_masked(command, words, capsys):
    with pytest.raises(SystemExit):
        command([word.format("me:word@") for word in words])
    shown = capsys.readouterr().err
    assert "no://***@host/" in shown
    assert "word" not in shown
