"""Tokenizer and other files of a Hugging Face directory survive import, a run and export."""

import json
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hf_models import GPT2, LLAMA, config_json, random_tensors, write_model

import jaxpipe.checkpoint.__main__ as command
from jaxpipe import train
from jaxpipe.checkpoint.hf.serving import ServingFiles
from jaxpipe.checkpoint.hf.streaming import StoredCheckpoint
from jaxpipe.config import ConfigError
from jaxpipe.tokenizer.files import TokenizerFiles

TOKENIZER = {
    "model": {"type": "BPE", "vocab": {"a": 5, "b": 6, "<pad>": 3}},
    "added_tokens": [{"id": 1, "content": "<s>"}, {"id": 2, "content": "</s>"}],
}
GENERATION = {"eos_token_id": [2, 7], "temperature": 0.6, "do_sample": True}
FILES = {
    "tokenizer.json": json.dumps(TOKENIZER).encode(),
    "tokenizer_config.json": json.dumps(
        {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": "<pad>"}
    ).encode(),
    "tokenizer.model": bytes(range(256)),
    "chat_template.jinja": b"{% for m in messages %}{{ m }}{% endfor %}\n",
    "additional_chat_templates/tool_use.jinja": b"tools",
}
IDS = {"bos_token_id": 1, "eos_token_id": [2, 7], "pad_token_id": 0}


def write_files(directory, files=FILES):
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    return directory


def published(directory, model=LLAMA, dtype=np.float32, **changes):
    """Write a directory as publishers do."""
    torch_dtype = {"torch_dtype": "bfloat16"} if np.dtype(dtype).itemsize == 2 else {}
    changes = {"max_position_embeddings": 128} | IDS | torch_dtype | changes
    write_model(directory, model, random_tensors(model, dtype), **changes)
    (directory / "generation_config.json").write_text(json.dumps(GENERATION))
    return write_files(directory)


def read_json(path):
    return json.loads(Path(path).read_text())


def test_the_token_before_a_text_is_the_tokenizers():
    """Published chat models have a BOS in config.json that their tokenizer does not use."""
    of_config = ServingFiles(token_ids={"bos_token_id": 5, "eos_token_id": 6})
    assert of_config.prefix_token_id == 5
    described = b'{"bos_token": null, "eos_token": "</s>"}'
    files = {"tokenizer.json": FILES["tokenizer.json"], "tokenizer_config.json": described}
    assert replace(of_config, files=files).prefix_token_id == 2
    assert replace(of_config, files=FILES).prefix_token_id == 1
    assert ServingFiles().prefix_token_id is None


def test_a_tokenizer_with_code_of_its_own_is_kept(tmp_path):
    own = {"tiktoken.model": b"IQ== 0\n", "tokenization_own.py": b"# code\n"}
    write_files(tmp_path, own | {"modeling_own.py": b""})
    assert ServingFiles.read(tmp_path, {}).files == own


def others_in(directory):
    """Return the files of a directory other than weights and config.json, by name."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in Path(directory).rglob("*")
        if path.is_file() and path.name != "config.json" and path.suffix != ".safetensors"
    }


def run_main(capsys, *words):
    """Return the output of the command, which must succeed."""
    assert command.main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def start_words(printed):
    """Return the arguments of the training command that import prints."""
    [line] = [line for line in printed.splitlines() if line.startswith("python -m jaxpipe.train")]
    return shlex.split(line)[3:]


SHORT = [
    "data.source=dummy", "train.steps=2", "train.seq_len=16", "runtime.cpu_devices=8",
    "parallel.dp=8", "parallel.zero_stage=0",
]  # fmt: skip


def trained(tmp_path, source, capsys, *more):
    """Return the last checkpoint of a run started with the printed command and these changes."""
    toml = tmp_path / "run.toml"
    printed = run_main(
        capsys, "import", source, "--write-config", toml, f"run.dir={tmp_path}/run", *SHORT
    )
    assert train.main([*start_words(printed), *more]) == 0
    capsys.readouterr()
    return tmp_path / "run" / "checkpoints" / "2"


@pytest.mark.slow
def test_a_run_hands_on_what_import_has_read(tmp_path, capsys):
    source = published(tmp_path / "hf", dtype="bfloat16")
    step = trained(tmp_path, source, capsys)
    printed = run_main(capsys, "export", step, tmp_path / "out")
    assert "not known" not in printed
    config = read_json(tmp_path / "out" / "config.json")
    assert {name: config[name] for name in IDS} == IDS
    assert config["max_position_embeddings"] == 128
    assert config["torch_dtype"] == "bfloat16"
    found = others_in(tmp_path / "out")
    assert json.loads(found.pop("generation_config.json")) == GENERATION
    assert found == FILES
    # A second run from the first one's checkpoint, and a resumed one, have the files too.
    again = [f"run.dir={tmp_path}/again", f"checkpoint.resume={step}"]
    assert train.main([str(tmp_path / "run.toml"), *SHORT, *again, "train.steps=3"]) == 0
    last = StoredCheckpoint(tmp_path / "again" / "checkpoints" / "3")
    assert ServingFiles.from_meta(last.meta) == ServingFiles.from_meta(StoredCheckpoint(step).meta)


def test_the_written_configuration_is_that_of_config_json(tmp_path, capsys):
    source = published(tmp_path / "hf", model=LLAMA)
    toml = tmp_path / "run.toml"
    run_main(capsys, "import", source, "--write-config", toml, "--out", tmp_path / "c")
    model = tomllib.loads(toml.read_text())["model"]
    assert model == {
        "family": "llama", "n_layers": 3, "d_model": 32, "n_heads": 4, "head_dim": 8, "d_ff": 48,
        "vocab_size": 64, "n_kv_heads": 2, "rope_theta": 10000.0, "max_seq_len": 128,
    }  # fmt: skip
    words = ["import", str(source), "--write-config", str(toml), "--out", str(tmp_path / "d")]
    assert command.main(words) == 2
    assert f"{toml} exists" in capsys.readouterr().err
    # A failed command leaves no file, so that it can be repeated.
    words[3] = str(tmp_path / "new.toml")
    assert command.main([*words, "model.d_ff=50"]) == 2
    assert "set model.d_ff=48" in capsys.readouterr().err
    assert not (tmp_path / "new.toml").exists()
    assert command.main(words) == 0


def test_the_printed_command_has_every_override(tmp_path, capsys):
    source = published(tmp_path / "hf", rms_norm_eps=1e-6)
    toml = tmp_path / "run.toml"
    run_main(capsys, "import", source, "--write-config", toml, "--out", tmp_path / "first")
    toml.write_text(toml.read_text().replace("1e-6", "1e-5").replace("1e-06", "1e-5"))
    out = ["--out", tmp_path / "c d"]
    words = start_words(run_main(capsys, "import", source, toml, "model.norm_eps=1e-6", *out))
    assert words == [
        str(toml), "model.norm_eps=1e-6", f"checkpoint.resume={tmp_path}/c d/0",
        "checkpoint.parameters_only=true",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "changes", "expected"),
    [
        (LLAMA, {}, {"bos_token_id": 1, "eos_token_id": 2}),  # transformers' defaults
        (LLAMA, {"eos_token_id": None}, {"bos_token_id": 1, "eos_token_id": None}),
        (LLAMA, {"eos_token_id": [5, 6]}, {"bos_token_id": 1, "eos_token_id": [5, 6]}),
        (GPT2, {}, {"bos_token_id": 50256, "eos_token_id": 50256}),
        (GPT2, {"bos_token_id": 3, "eos_token_id": 3}, {"bos_token_id": 3, "eos_token_id": 3}),
    ],
)
def test_ids_of_config_json_alone(tmp_path, capsys, model, changes, expected):
    source = write_model(tmp_path / "hf", model, random_tensors(model), **changes)
    toml, out = tmp_path / "run.toml", tmp_path / "out"
    run_main(capsys, "import", source, "--write-config", toml, "--out", tmp_path / "c")
    printed = run_main(capsys, "export", tmp_path / "c" / "0", out)
    config = read_json(out / "config.json")
    assert {name: config[name] for name in expected} == expected
    assert config["torch_dtype"] == "float32"
    assert others_in(out) == {}
    assert ("does not stop" in printed) == (expected["eos_token_id"] is None)
    assert "the tokenizer's files" in printed


def prepared_folder(tmp_path, tokenizer, eod):
    data = pytest.importorskip("jaxpipe.data.__main__")
    messages = [{"role": role, "content": "abab"} for role in ("user", "assistant")]
    (tmp_path / "chats.jsonl").write_text(3000 * f"{json.dumps({'messages': messages})}\n")
    words = ["prepare", tmp_path / "chats.jsonl", "--tokenizer", tokenizer, "--chat", "--eod", eod]
    assert data.main([str(word) for word in (*words, "--out", tmp_path / "data")]) == 0
    return tmp_path / "data"


def byte_level(directory):
    """Write a tokenizer with two special tokens, of which the chat template writes one."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[:60]
    vocab = {name: number for number, name in enumerate(["a", "b", *alphabet[:20]])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="a"))
    made.add_special_tokens(["<end>", "<other>"])
    directory.mkdir()
    made.save(str(directory / "tokenizer.json"))
    template = "{% for one in messages %}{{ one.content }}<other>{% endfor %}"
    (directory / "chat_template.jinja").write_text(template)
    return directory, [made.token_to_id("<end>"), made.token_to_id("<other>")]


@pytest.mark.slow(only=["False", "True"])
@pytest.mark.parametrize("imported", [False, True])
def test_the_data_say_what_ends_a_text_or_a_turn(tmp_path, capsys, imported):
    tokenizer, ends = byte_level(tmp_path / "tok")
    folder = prepared_folder(tmp_path, tokenizer, "<end>")
    of_data = ["data.source=file", f"data.path={folder}"]
    if imported:
        source = published(tmp_path / "hf")
        step = trained(tmp_path, source, capsys, *of_data)
    else:
        toml = tmp_path / "run.toml"
        run_main(
            capsys, "import", published(tmp_path / "hf"), "--write-config", toml, "--out",
            tmp_path / "c",
        )  # fmt: skip
        assert train.main([str(toml), *SHORT, f"run.dir={tmp_path}/run", *of_data]) == 0
        step = tmp_path / "run" / "checkpoints" / "2"
    printed = run_main(capsys, "export", step, tmp_path / "out")
    assert "not known" not in printed
    config, found = read_json(tmp_path / "out" / "config.json"), others_in(tmp_path / "out")
    if imported:  # those that import read, and two more
        assert config["eos_token_id"] == [2, 7, *ends]
        assert json.loads(found["generation_config.json"]) == GENERATION | {
            "eos_token_id": [2, 7, *ends]
        }
        assert found["tokenizer.json"] == FILES["tokenizer.json"]
    else:
        assert config["eos_token_id"] == ends
        assert found["tokenizer.json"] == (tokenizer / "tokenizer.json").read_bytes()
        assert json.loads(found["tokenizer_config.json"])["eos_token"] == "<end>"


@pytest.mark.parametrize("generation", [{}, {"top_k": 5}, {"eos_token_id": None}])
def test_a_token_of_the_data_hides_no_eos(generation):
    known = ServingFiles(token_ids={"eos_token_id": 2}, generation=generation)
    assert known.eos_token_ids == (2,)
    assert known.with_data(TokenizerFiles("", {}), 64, ends=[9]).eos_token_ids == (2, 9)


@pytest.fixture
def step(tmp_path, capsys):
    """Return a checkpoint without tokenizer files."""
    source = write_model(
        tmp_path / "bare", LLAMA, random_tensors(LLAMA), eos_token_id=None, bos_token_id=None
    )
    toml = tmp_path / "bare.toml"
    run_main(capsys, "import", source, "--write-config", toml, "--out", tmp_path / "bare_c")
    return tmp_path / "bare_c" / "0"


def test_a_tokenizer_may_be_given(tmp_path, capsys, step):
    directory = write_files(tmp_path / "tok")
    printed = run_main(capsys, "export", step, tmp_path / "out", "--tokenizer", directory)
    assert "not known" not in printed
    config = read_json(tmp_path / "out" / "config.json")
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    assert {name: config[name] for name in ids} == ids
    assert others_in(tmp_path / "out") == FILES
    # A model's directory also has the tokens that stop generation.
    (directory / "config.json").write_text(json.dumps(config_json(LLAMA) | IDS))
    (directory / "generation_config.json").write_text(json.dumps(GENERATION))
    run_main(capsys, "export", step, tmp_path / "out2", "--tokenizer", directory)
    config = read_json(tmp_path / "out2" / "config.json")
    assert {name: config[name] for name in IDS} == IDS
    assert json.loads(others_in(tmp_path / "out2")["generation_config.json"]) == GENERATION


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no tokenizer"),
        ({"tokenizer_config.json": FILES["tokenizer_config.json"]}, "holds no tokenizer"),
        ({"tokenizer.json": b"{", "tokenizer_config.json": b"{}"}, "is not a JSON object"),
        (
            FILES | {"config.json": b'{"eos_token_id": [2, 64]}'},
            r"has eos_token_id=\[2, 64\], but model.vocab_size=64",
        ),
    ],
)
def test_a_directory_that_is_no_tokenizer_of_the_model(tmp_path, files, message):
    directory = tmp_path / "tok"
    directory.mkdir()
    write_files(directory, files)
    with pytest.raises(ConfigError, match=message):
        ServingFiles().with_tokenizer(directory, vocab_size=64)


def test_metadata_keeps_all_of_it():
    serving = ServingFiles(IDS, 128, "bfloat16", GENERATION, FILES)
    assert ServingFiles.from_meta(json.loads(json.dumps(serving.as_meta()))) == serving
    assert ServingFiles.from_meta({"step": 3}) == ServingFiles()
    assert ServingFiles().as_meta() == {}


@pytest.mark.extended
def test_what_is_exported_stops_where_the_original_does(tmp_path, capsys):
    """A head that always prefers token 2: `[5, 6, 2]` both times."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        bos_token_id=1, eos_token_id=[2, 9],
    )  # fmt: skip
    original = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():  # for all inputs every logit is 0 except that of token 2
        original.model.embed_tokens.weight.fill_(1.0)
        for layer in original.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        original.lm_head.weight.zero_()[2] = 1.0
    original.save_pretrained(tmp_path / "hf")
    step = trained(tmp_path, tmp_path / "hf", capsys, "optimizer.lr=1e-9")
    run_main(capsys, "export", step, tmp_path / "out")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()
    for model in (transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf"), again):
        prompt = torch.tensor([[5, 6]])
        made = model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert made.tolist() == [[5, 6, 2]]
    assert again.config.max_position_embeddings == 128
