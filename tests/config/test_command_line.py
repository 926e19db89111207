"""Command lines: help, options that are settings, paths that are URLs, files of other kinds."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from commands import SMALL
from resolving import resolved

from jaxpipe import plan, profile, train
from jaxpipe.checkpoint.hf.safetensors_directory import INDEX, TensorFiles
from jaxpipe.config import ConfigError, load
from jaxpipe.data.prepare.readers import DocumentReader, FilePart
from jaxpipe.data.prepare.records import RecordConverter
from jaxpipe.run.watch.summary import _learning_rate

CONFIG = str(SMALL)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--steps", "5"], "--steps is no option of this command: .* as train.steps=5"),
        (["--steps=5"], "as train.steps=5"),
        (["--train.steps", "5"], "as train.steps=5"),
        (["--grad-accum-steps", "5"], "as train.grad_accum_steps=5"),
        (["--seed", "5"], "as train.seed=5"),  # and no --seed-checkpoint
        (["--d-model=8"], "as model.d_model=8"),
        (["--bogus"], "--bogus is no option of this command: --help lists them"),
    ],
)
@pytest.mark.parametrize("command", [train, plan, profile])
def test_an_option_that_is_a_setting(command, words, sentence, capsys):
    with pytest.raises(ConfigError, match=sentence):
        raise ConfigError(_refused(command, [CONFIG, *words], capsys))


def _refused(command, words, capsys):
    assert command.main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    return said.err


@pytest.mark.parametrize("command", [train, plan, profile])
def test_help_says_how_settings_are_given_before_the_exit_codes(command, capsys):
    with pytest.raises(SystemExit):
        command.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert 0 < text.index("train.steps=20") < text.index("Exit codes:")
    assert "--print-config" in text


@pytest.mark.parametrize(
    ("key", "url", "why"),
    [("parallel.costs", "s3://bucket/run", "is a URL, but this is read and written on a disk"),
     ("parallel.schedule_file", "gs://b/x", "is a URL, but this is read and written on a disk"),
     ("run.dir", "hf://a/b", "begins with hf://, but what holds checkpoints"),
     ("checkpoint.resume", "file:///tmp/x", "begins with file://, but what holds checkpoints"),
     ("data.path", "nowhere://a", "begins with nowhere://, which fsspec does not know")],
)  # fmt: skip
def test_addresses_that_nothing_reads_are_refused(key, url, why, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert f"{key}='{url}' {why}" in _refused(train, [CONFIG, f"{key}={url}"], capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.extended
def test_addresses_are_refused_elsewhere_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "is a URL" in _refused(train, ["s3://b/c.toml"], capsys)
    with pytest.raises(ConfigError, match=r"data.sources\[1\].path='no://b/x' begins with no://"):
        load(CONFIG, ["data.sources=[{path='a'}, {path='no://b/x'}]"])
    for command in (["jaxpipe.checkpoint", "export", "no://b/1", "out"],
                    ["jaxpipe.checkpoint", "import", "no://b", CONFIG],
                    ["jaxpipe.data", "prepare", "no://b/x", "--tokenizer", "bytes", "--out",
                     "o"]):  # fmt: skip
        ran = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True,
                             env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
                             check=False)  # fmt: skip
        assert ran.returncode == 2
        assert "begins with no://, which fsspec does not know" in ran.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("path", "sentence"),
    [(r'"a\u0000b"', "null character"), ("a\udcff", "bytes that are no UTF-8")],
)
def test_a_path_is_text(path, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load(CONFIG, [f"run.dir={path}"])


@pytest.mark.parametrize("command", [train, plan, profile])
def test_settings_are_not_required(command, capsys):
    with pytest.raises(SystemExit):
        command.main([])
    assert capsys.readouterr().err.endswith("arguments are required: CONFIG\n")


@pytest.mark.parametrize("path", ["2026-11-26", "2024", 'a"😀'])
def test_a_path_of_an_option_is_no_value_of_toml(path, capsys):
    assert train.main([CONFIG, "--resume", path, "--print-config"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["checkpoint"]["resume"] == path
    assert f"cannot read op seconds from {path}" in _refused(
        plan, [CONFIG, "--costs", path], capsys
    )


def test_a_config_with_a_byte_order_mark_or_windows_ends_is_read(tmp_path):
    text = SMALL.read_bytes()
    for name, content in (("bom", b"\xef\xbb\xbf" + text), ("crlf", text.replace(b"\n", b"\r\n"))):
        (tmp_path / name).write_bytes(content)
        assert load(tmp_path / name, ["run.dir=a"]) == load(CONFIG, ["run.dir=a"])


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (SMALL.read_text().encode("utf-16"), "is not in UTF-8, perhaps in UTF-16: save it as"),
        (SMALL.read_text().encode("utf-16-le"), "is not in UTF-8, perhaps in UTF-16: save it as"),
        (b"# \xe4\n[train]", "is not in UTF-8 .*: save it as UTF-8"),
        (b"x = " + b"[" * 100_000, "is not valid TOML"),
        (b"x = " + b"9" * 5000, "is not valid TOML"),
    ],
)
def test_a_config_of_another_kind_is_a_sentence(tmp_path, content, sentence):
    path = tmp_path / "own.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=sentence) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_a_run_in_place_of_its_config(tmp_path, capsys):
    (tmp_path / "config.toml").touch()
    said = _refused(profile, [str(tmp_path)], capsys)
    assert f"such as {tmp_path / 'config.toml'}" in said


def test_a_typo_names_the_nearest_key_alone(capsys):
    said = _refused(train, [CONFIG, "train.stepps=3"], capsys)
    assert "did you mean train.steps? `python -m jaxpipe.train CONFIG --print-config`" in said
    assert "eval_every" not in said
    assert "did you mean optimizer.lr?" in _refused(train, [CONFIG, "train.lr=1"], capsys)
    said = _refused(train, [CONFIG, "distributed.pp=2"], capsys)
    assert "did you mean [parallel]? Sections are run, model, parallel, train" in said


def test_a_run_may_end_within_its_warm_up():
    """Its rates are those of a longer run; the summary shows where the run ends."""
    config = load("configs/quickstart.toml", ["train.steps=20"])
    resolved(config, count=8)
    assert _learning_rate(config).endswith("of which this run has 20: it ends at 2.00e-03")


def test_a_step_has_a_number_of_tokens_and_forwards_that_can_be_counted():
    for more, sentence in (
        (["train.seq_len=100000", "train.microbatch_size=10000"], "as far as its targets"),
        (["train.grad_accum_steps=20000"], "80000 forwards, but a schedule has at most 65536"),
        (["parallel.schedule=zbv", "train.grad_accum_steps=10000"], "on 8 stages .* 80000"),
        (["train.batch_tokens=2560000", "train.grad_accum_steps=0"], "160000 forwards"),
        (
            ["train.fused_steps=10000", "train.eval_every=0", "checkpoint.every=0"],
            "160000 forwards",
        ),
    ):
        with pytest.raises(ConfigError, match=sentence):
            resolved(load(CONFIG, more), count=8)


def test_a_model_that_no_memory_holds(capsys):
    more = ["model.d_ff=2000000000", "runtime.cpu_devices=8"]
    said = _refused(train, [CONFIG, *more], capsys)
    assert "their float32 values and gradients alone take" in said
    config = load(CONFIG, ["model.d_ff=10000000"])
    assert config.model.parameter_count() * 8 > 28.6 * 2**30  # four layers of 3 x 32 x d_ff
    devices = {"count": 8, "platform": "cuda", "memory": 28.6 * 2**27}
    with pytest.raises(ConfigError, match="have 28.6 GiB together"):
        resolved(config, **devices)
    adapters = ["lora.rank=1", "train.compute_dtype=bfloat16"]  # frozen weights in bfloat16
    resolved(load(CONFIG, ["model.d_ff=10000000", *adapters]), **devices)
    with pytest.raises(ConfigError, match="their bfloat16 values alone take 71.5 GiB"):
        resolved(load(CONFIG, ["model.d_ff=100000000", *adapters]), **devices)


def test_too_little_memory_is_a_sentence(monkeypatch, capsys):
    import jax

    def lack(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes.")

    monkeypatch.setattr(train, "train", lack)
    assert "too little memory for this run (RESOURCE_EXHAUSTED" in _refused(train, [CONFIG], capsys)


@pytest.mark.parametrize("name", ["../secret/x.safetensors", "/etc/passwd", "..", "", "a\\b", 5])
def test_shards_are_files_of_their_directory(tmp_path, name):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(ConfigError, match="which is no file of its directory"):
        TensorFiles(tmp_path)


def test_json_that_is_nested_too_deep_is_a_sentence(tmp_path):
    deep = b'{"text": ' + b"[" * 200_000 + b"]" * 200_000 + b"}\n"
    path = tmp_path / "deep.jsonl"
    path.write_bytes(deep + b'{"text": "good"}\n')
    part = FilePart(str(path), 0, path.stat().st_size, path.stat().st_size)
    with pytest.raises(ConfigError, match="line 1, is no document"):
        list(
            DocumentReader(RecordConverter(), skip_bad=False, advance=lambda _: None).documents(
                part
            )
        )
    reader = DocumentReader(RecordConverter(), skip_bad=True, advance=lambda _: None)
    assert list(reader.documents(part)) == [[("good", True)]]
    assert reader.bad == 1
    (tmp_path / INDEX).write_bytes(b"[" * 200_000)
    with pytest.raises(ConfigError, match="is not an index of safetensors"):
        TensorFiles(tmp_path)


@pytest.mark.slow
def test_a_run_that_is_done_says_what_it_left(tmp_path, capsys):
    assert train.main([CONFIG, f"run.dir={tmp_path}", "train.steps=2", "train.eval_every=0"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"done: 2 steps; saved in {tmp_path}/checkpoints/2, ")
    assert (tmp_path / "checkpoints" / "2").is_dir()
