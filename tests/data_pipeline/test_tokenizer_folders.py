"""Ids of tokenizers' folders are those of transformers, or the folder is refused."""

import json
import re
from pathlib import Path

import fsspec
import pytest
import tokenizer_folders
from texts import lines, prepared
from tokenizer_folders import FOLDERS, NOT_UNDERSTOOD, TEXTS, folder, tokenizer_json, write

from jaxpipe.config import ConfigError
from jaxpipe.data.prepare.tokenizing import load_tokenizer, read_tokenizer
from jaxpipe.data.shards.token_files import open_documents
from jaxpipe.tokenizer.files import BYTES, TOKENIZER, TokenizerFiles
from jaxpipe.tokenizer.tokens import read_tokens

RECORDED = json.loads(tokenizer_folders.RECORD.read_text())


@pytest.mark.parametrize("name", FOLDERS)
def test_ids_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    size, ids = RECORDED[name]
    files = TokenizerFiles.read(write(FOLDERS[name], tmp_path))
    tokenizer = load_tokenizer(files)
    assert [one.ids.tolist() for one in tokenizer.encode([[(t, True)] for t in TEXTS])] == ids
    assert [read_tokenizer(files).encode(text).ids for text in TEXTS] == ids
    assert tokenizer.vocab_size == size
    assert max(read_tokens(files).ids.values()) + 1 == size


@pytest.mark.parametrize("name", NOT_UNDERSTOOD)
def test_what_is_not_understood_is_named(tmp_path: Path, name: str) -> None:
    files, named = NOT_UNDERSTOOD[name]
    with pytest.raises(ConfigError, match=re.escape(named)):
        load_tokenizer(str(write(files, tmp_path)))


def test_unknown_fields_that_say_nothing_are_no_matter(tmp_path: Path) -> None:
    fields = {"do_lower_case": False, "from_slow": None, "sp_model_kwargs": {}, "auto_map": {}}
    assert load_tokenizer(str(write(folder(fields), tmp_path))).vocab_size == 97


@pytest.mark.usefixtures("in_process")
def test_a_prepared_folder_has_the_same_tokenizer(tmp_path: Path) -> None:
    """Its ids, its vocabulary and all of its files; and changed files are noticed."""
    name = "additional_special_tokens"
    model = write(FOLDERS[name], tmp_path / "model")
    (tmp_path / "a.jsonl").write_bytes(lines([{"text": text} for text in TEXTS]))
    manifest = prepared([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer=str(model))
    assert manifest.tokenizer.vocab_size == RECORDED[name][0]
    documents = open_documents(str(tmp_path / "out"), 99)
    ids = [documents.tokens(number).tolist() for number in range(len(TEXTS))]
    assert ids == [[*one, 96] for one in RECORDED[name][1]]
    kept = TokenizerFiles.read(tmp_path / "out")
    assert kept.contents == TokenizerFiles.read(model).contents
    for file in ("added_tokens.json", "generation_config.json", "chat_template.jinja"):
        (model / file).write_text("{}")
        with pytest.raises(ConfigError, match=r"out already holds what was prepared of others"):
            prepared([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer=str(model))
        (model / file).unlink()
    again = prepared([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer=str(model / TOKENIZER))
    assert again == manifest


def test_bytes_are_a_tokenizer_of_other_programs(tmp_path: Path) -> None:
    files = TokenizerFiles.read(BYTES)
    assert files.is_bytes
    tokenizer = read_tokenizer(files)
    for text in ("def f():\n\treturn 'é日🙂'\0\r\n  ĀĠ", "".join(map(chr, range(0x500)))):
        ids = tokenizer.encode(text).ids
        assert ids == list(text.encode())
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    files.write(tmp_path)
    assert TokenizerFiles.read(tmp_path).is_bytes


def test_only_the_tokenizer_is_read_from_an_address(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    files = {name: json.dumps(fields) for name, fields in FOLDERS["added_tokens.json"].items()}
    files |= {"model.safetensors": "weights", "additional_chat_templates/tool_use.jinja": "x"}
    for name, text in files.items():
        store.pipe_file(f"/models/one/{name}", text.encode())
    wanted = {name: text.encode() for name, text in files.items() if name != "model.safetensors"}
    for address in ("memory://models/one", f"memory://models/one/{TOKENIZER}"):
        assert TokenizerFiles.read(address).contents == wanted
    with pytest.raises(ConfigError, match="memory://models/none does not exist: correct"):
        TokenizerFiles.read("memory://models/none")


def test_a_model_whose_class_is_not_what_it_says(tmp_path: Path) -> None:
    """The first Mistral's tokenizer.json splits otherwise than its class, and decides."""
    pieces = tokenizer_json(
        normalizer={"type": "Prepend", "prepend": "▁"},
        pre_tokenizer=None,
        model=tokenizer_json()["model"] | {"fuse_unk": True, "byte_fallback": True},
    )
    model = write(folder({"tokenizer_class": "LlamaTokenizer"}, pieces), tmp_path)
    with pytest.raises(ConfigError, match="another normalizer for tokenizer_class=LlamaTokenizer"):
        load_tokenizer(str(model))
    (model / "config.json").write_text('{"model_type": "mixtral"}')
    files = TokenizerFiles.read(model)
    assert load_tokenizer(files).vocab_size == 97
    assert "config.json" not in files.contents
    assert files.json("tokenizer_config.json")["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_files_beside_another_tokenizer_are_not_read(tmp_path: Path) -> None:
    write(FOLDERS["added_tokens.json"], tmp_path)
    other = tmp_path / "other.json"
    other.write_bytes((tmp_path / TOKENIZER).read_bytes())
    assert load_tokenizer(str(other)).vocab_size == 97
    (tmp_path / TOKENIZER).unlink()
    assert load_tokenizer(str(other)).vocab_size == 98
