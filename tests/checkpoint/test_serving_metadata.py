"""Tokenizers in a checkpoint's metadata: those of strangers, and what outlives another one."""

import base64
import zlib

import pytest
import tokenizer_folders

from jaxpipe.checkpoint.hf import serving
from jaxpipe.checkpoint.hf.serving import ServingFiles
from jaxpipe.config import ConfigError
from jaxpipe.tokenizer.files import TokenizerFiles


def packed(name, content, **fields):
    text = base64.b64encode(zlib.compress(content)).decode()
    return {"huggingface": {"files": {name: text}} | fields}


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        (packed("../evil.txt", b"x"), r"a file '../evil.txt', which is none of a tokenizer"),
        (packed("/etc/evil.jinja", b"x"), "a file '/etc/evil.jinja'"),
        (packed("additional_chat_templates/../../x.jinja", b"x"), "which is none of a tokenizer"),
        (packed("tokenizer.json", bytes(1 << 20)), "has more bytes than tokenizers have"),
        (packed("tokenizer.json", b"x", secrets=1), "an unknown field 'secrets'"),
        (packed("tokenizer.json", b"x", token_ids={"eos_token_id": "</s>"}), "metadata are wrong"),
        ({"huggingface": {"files": {"tokenizer.json": "AAAA"}}}, "tokenizer.json in .* is damaged"),
        ({"huggingface": ["x"]}, "metadata are wrong"),
    ],
)
def test_metadata_of_strangers(monkeypatch, meta, message):
    """Nothing is written outside a folder, and nothing grows without limit."""
    monkeypatch.setattr(serving, "_LARGEST", 1 << 16)
    with pytest.raises(ConfigError, match=message):
        ServingFiles.from_meta(meta)


def tokenizer_folder(directory, template="", **config):
    files = tokenizer_folders.folder(config)
    tokenizer_folders.write(files, directory)
    if template:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def test_what_a_run_knows_outlives_another_tokenizer(tmp_path):
    """Ids 5 and 7 end texts and turns, and replies are drawn at 0.6."""
    data = TokenizerFiles.read(tokenizer_folder(tmp_path / "data", "chats"))
    run = ServingFiles(generation={"temperature": 0.6}).with_data(
        data, 200, ends=[5, 7], starts=[3], has_chats=True
    )
    ids = {"bos_token_id": 3, "eos_token_id": [5, 7]}
    assert run.token_ids == ids
    given = tokenizer_folder(tmp_path / "given", eos_token="</s>", pad_token="!")
    (given / "generation_config.json").write_text('{"eos_token_id": 9, "top_p": 0.9}')
    joined = run.with_tokenizer(given, 200)
    assert joined.token_ids == ids | {"eos_token_id": [5, 7, 96], "pad_token_id": 0}
    assert joined.generation == {"temperature": 0.6, "top_p": 0.9, "eos_token_id": [5, 7, 96, 9]}
    assert joined.tokenizer.chat_templates == {"default": "chats"}
    own = tokenizer_folder(tmp_path / "own", "its own")
    assert run.with_tokenizer(own, 200).tokenizer.chat_templates == {"default": "its own"}
    other = tokenizer_folders.tokenizer_json()
    other["model"]["vocab"] |= {"&": 7, "(": 5}
    tokenizer_folders.write(tokenizer_folders.folder(tokenizer=other), tmp_path / "other")
    with pytest.raises(ConfigError, match=r"gives '&' the id 7, but the model ends a text with it"):
        run.with_tokenizer(tmp_path / "other", 200)


def test_further_data_change_what_they_must(tmp_path):
    """A template of the chats that are trained on; the tokenizer only if it has more tokens."""
    base = ServingFiles().with_tokenizer(tokenizer_folder(tmp_path / "base", "base"), 200)
    text = TokenizerFiles.read(tokenizer_folder(tmp_path / "text", "unused"))
    assert base.with_data(text, 200, ends=[96]).files == base.files
    chats = base.with_data(text, 200, has_chats=True)
    assert chats.tokenizer.chat_templates == {"default": "unused"}
    assert chats.with_data(text, 200, has_chats=True) == chats
    more = tokenizer_folder(tmp_path / "more", extra_special_tokens=["<tool>"])
    grown = base.with_data(TokenizerFiles.read(more), 200, ends=[96])
    assert grown.tokenizer.json("tokenizer_config.json")["extra_special_tokens"] == ["<tool>"]
    assert grown.tokenizer.chat_templates == {"default": "base"}
    assert [one.example_prompt for one in (base, ServingFiles())] == ["--chat --prompt Hello", ""]
