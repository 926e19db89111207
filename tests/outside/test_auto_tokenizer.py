"""The recorded ids of tokenizers' folders are those of transformers; and folders that it writes."""

import json
from pathlib import Path

import pytest
import tokenizer_folders
from tokenizer_folders import TEXTS, tokenizer_json, write

from jaxpipe.data.prepare.tokenizing import read_tokenizer
from jaxpipe.tokenizer.files import BYTES, TokenizerFiles
from jaxpipe.tokenizer.tokens import read_tokens

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def test_transformers_gives_what_was_recorded(tmp_path: Path) -> None:
    assert tokenizer_folders.record(tmp_path) == json.loads(tokenizer_folders.RECORD.read_text())


@pytest.mark.parametrize("name", ["LlamaTokenizer", "GemmaTokenizer", "GPT2Tokenizer",
                                  "Qwen2Tokenizer", "PreTrainedTokenizerFast"])  # fmt: skip
def test_classes_as_transformers_saves_them(tmp_path: Path, name: str) -> None:
    model = tokenizer_json()["model"]
    kind = getattr(transformers, name)
    if name == "PreTrainedTokenizerFast":
        write({"tokenizer.json": tokenizer_json()}, tmp_path / "from")
        library = kind(tokenizer_file=str(tmp_path / "from" / "tokenizer.json"))
    else:
        vocab = model["vocab"] | {"<unk>": len(model["vocab"])}
        library = kind(vocab=vocab, merges=[tuple(one) for one in model["merges"]])
    library.add_tokens(["<tool>"])
    library.add_special_tokens({"eos_token": "</s>", "extra_special_tokens": ["<x>"]})
    library.save_pretrained(tmp_path / "model")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    files = TokenizerFiles.read(tmp_path / "model")
    ours = read_tokenizer(files)
    for text in [*TEXTS, " two  words\n", "</s> after", "<s>after"]:
        assert ours.encode(text).ids == again(text)["input_ids"]
    assert read_tokens(files).named == {
        key: value for key, value in again.special_tokens_map.items() if isinstance(value, str)
    }


def test_transformers_loads_the_tokenizer_of_bytes(tmp_path: Path) -> None:
    TokenizerFiles.read(BYTES).write(tmp_path)
    library = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("def f():\n\treturn 'é日🙂'\0\r\n  ĀĠ", "".join(map(chr, range(0x500)))):
        assert library(text)["input_ids"] == list(text.encode())
        assert library.decode(list(text.encode())) == text
