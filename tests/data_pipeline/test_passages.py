"""Passages as tokens: ids of the whole text, and a loss mask by the characters of each."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from texts import prepared
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxpipe.config import ConfigError
from jaxpipe.data.prepare.records import Passages, RecordConverter
from jaxpipe.data.prepare.tokenizing import ByteTokenizer, FileTokenizer, load_tokenizer
from jaxpipe.data.shards.token_files import open_documents

MARKS = ["<|im_start|>", "<|im_end|>"]
TEXTS = ["foo bar foobar  baz\nfoo\n\nbar é ü 日本 🙂", "user\nhi\n", "assistant\nyo\n\nyes"] * 9


def byte_level(**options: bool) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(**options)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
    )
    made.train_from_iterator(TEXTS, trainer)
    return made


def sentence_piece(legacy: bool) -> tokenizers.Tokenizer:
    """Like Llama 2's and Mistral's: a blank in front, by the normalizer or by Metaspace."""
    made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    if legacy:
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special)
    made.train_from_iterator([text.replace(" ", "▁") for text in TEXTS], trainer)
    return made


def normalized() -> tokenizers.Tokenizer:
    """Like Qwen's: bytes of the text in NFC, split by a regex."""
    made = byte_level(add_prefix_space=False)
    made.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(tokenizers.Regex(r"\w+|\s+|[^\w\s]+"), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return made


def without_letters() -> tokenizers.Tokenizer:
    """A byte-level tokenizer that drops some bytes, since they have no token."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(["foo bar foobar\n日"], trainers.BpeTrainer(vocab_size=60))
    return made


KINDS = {
    "bytes": lambda: byte_level(add_prefix_space=False),
    "normalized": normalized,
    "without letters": without_letters,
    "prefix": lambda: byte_level(add_prefix_space=True),
    "metaspace": lambda: sentence_piece(legacy=False),
    "legacy": lambda: sentence_piece(legacy=True),
}


@pytest.fixture(scope="module", params=KINDS)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = KINDS[request.param]()
    made.add_special_tokens(["<|im_start|>", tokenizers.AddedToken("<|im_end|>", rstrip=True)])
    path = tmp_path_factory.mktemp(request.param) / "tokenizer.json"
    made.save(str(path))
    return path


def test_prompt_and_completion_are_the_ids_of_their_text(file: Path) -> None:
    tokenizer = load_tokenizer(str(file))
    library = tokenizers.Tokenizer.from_file(str(file))
    for prompt, completion in product(["foo", "foo ", "ba", "foo\n", "日", ""], repeat=2):
        (one,) = tokenizer.encode([[(prompt, False), (completion, True)]])
        whole = library.encode(prompt + completion, add_special_tokens=False)
        assert one.ids.tolist() == whole.ids
        assert tokenizer.decode(one.ids).lstrip() == (prompt + completion).lstrip()
    (bar,) = tokenizer.encode([[("foo", False), ("bar", True)]])
    assert tokenizer.decode(bar.ids).lstrip() == "foobar"


PIECES = st.sampled_from(
    ["foo", "bar", " ", "\n", "é", "e\u0301", "日", "🙂", "\u0958", "", *MARKS]
)
PASSAGES = st.lists(st.tuples(st.lists(PIECES, max_size=4).map("".join), st.booleans()), max_size=6)


# In NFC the first is three bytes longer, the others are each a byte shorter.
@example([("\u0958foo", False), ("e\u0301" * 3 + "bar", True)])
@given(PASSAGES)
def test_a_token_counts_if_one_of_its_characters_does(file: Path, passages: Passages) -> None:
    """Against the offsets of all tokens, character by character."""
    tokenizer = load_tokenizer(str(file))
    library = tokenizers.Tokenizer.from_file(str(file))
    library.post_processor = processors.Sequence([])
    text = "".join(text for text, _ in passages)
    counts = [counted for text, counted in passages for _ in text]
    whole = library.encode(text, add_special_tokens=False)
    (one,) = tokenizer.encode([passages])
    assert one.ids.tolist() == whole.ids
    assert one.counted.tolist() == [any(counts[begin:end]) for begin, end in whole.offsets]
    (bytes_of,) = ByteTokenizer().encode([passages])
    assert bytes_of.ids.tobytes() == text.encode()
    each = [counted for text, counted in passages for _ in text.encode()]
    assert bytes_of.counted.tolist() == each


def test_a_token_over_a_border_counts(file: Path) -> None:
    tokenizer = load_tokenizer(str(file))
    for passages in ([("fo", False), ("o", True)], [("fo", True), ("o", False)]):
        (one,) = tokenizer.encode([passages])
        assert one.counted.tolist() == [True]  # foo is one token


def test_documents_of_both_kinds_keep_their_order(file: Path) -> None:
    tokenizer = load_tokenizer(str(file))
    documents = [[("foo", True)], [("foo", False), ("bar", True)], [], [("bar", False)]]
    together = tokenizer.encode(documents)
    for document, encoded in zip(documents, together, strict=True):
        (alone,) = tokenizer.encode([document])
        assert encoded.ids.tolist() == alone.ids.tolist()
        assert encoded.counted.tolist() == alone.counted.tolist()
    assert [one.counted.any() for one in together] == [True, True, False, False]


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("eos", "ends"), [("<|im_end|>", ["\n", "foo", "<|im_end|>"]), ("</s>", ["</s>"] * 3)]
)
def test_a_chat_that_ends_with_eos_has_no_second(tmp_path: Path, eos: str, ends: list[str]) -> None:
    made = byte_level(add_prefix_space=False)
    made.add_special_tokens([*MARKS, "</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    chat = {"messages": [{"role": "assistant", "content": "yo"}]}
    records = [chat, {"text": "foo"}, {"text": f"foo{eos}"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    manifest = prepared([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer=str(tmp_path))
    assert manifest.end_of_turn == made.token_to_id("<|im_end|>")
    documents = open_documents(str(tmp_path / "out"), 1000)
    texts = [made.decode(documents.tokens(i).tolist(), skip_special_tokens=False) for i in range(3)]
    chat_text = "<|im_start|>assistant\nyo<|im_end|>\n"
    more = "" if eos == "<|im_end|>" else eos
    assert texts == [chat_text + more, f"foo{eos}", f"foo{eos}"]
    assert documents.counted(0).tolist()[-1]


@pytest.mark.usefixtures("in_process")
def test_a_tokenizer_without_marks_writes_no_chat(tmp_path: Path) -> None:
    made = sentence_piece(legacy=False)
    made.save(str(tmp_path / "tokenizer.json"))
    chat = {"messages": [{"role": "assistant", "content": "yo"}]}
    (tmp_path / "a.jsonl").write_text(f'{{"text": "foo"}}\n{json.dumps(chat)}')
    for skip in (False, True):
        with pytest.raises(
            ConfigError,
            match=r"a\.jsonl, line 2, has messages, .* has no token <\|im_start\|>: give one",
        ):
            prepared(
                [tmp_path / "a.jsonl"],
                tmp_path / "out",
                tokenizer=str(tmp_path),
                skip_bad_lines=skip,
            )


@pytest.mark.extended
@pytest.mark.parametrize("where", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_template_that_is_not_used_is_told(
    tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from jaxpipe.data.__main__ import main

    made = byte_level(add_prefix_space=False)
    made.add_special_tokens(MARKS)
    made.save(str(tmp_path / "tokenizer.json"))
    content = "{{ x }}" if where.endswith("jinja") else json.dumps({"chat_template": "{{ x }}"})
    (tmp_path / where).write_text(content)
    chat = {"messages": [{"role": "assistant", "content": "yo"}]}
    for name, record in (("chat", chat), ("text", {"text": "a"})):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(record))
        words = ["--tokenizer", str(tmp_path), "--out", str(tmp_path / name), "--workers", "1"]
        assert main(["prepare", str(tmp_path / f"{name}.jsonl"), *words]) == 0
        said = capsys.readouterr().out
        assert ("written in ChatML, not by the tokenizer's chat template" in said) == (
            name == "chat"
        )


def test_bytes_have_no_marks_of_their_own() -> None:
    assert ByteTokenizer().mark_of(0) == ""
    passages = RecordConverter().passages({"messages": [{"role": "assistant", "content": "é"}]})
    (one,) = ByteTokenizer().encode([passages])
    assert one.counted.sum() == len("é<|im_end|>\n".encode())
    assert np.flatnonzero(~one.counted)[-1] == len("<|im_start|>assistant\n") - 1


def test_what_is_no_special_token_may_end_a_text_twice() -> None:
    made = byte_level(add_prefix_space=False)
    foo = made.token_to_id("foo")
    assert foo is not None
    assert FileTokenizer(made).mark_of(foo) == ""
    assert FileTokenizer(made).mark_of(0) == "<|endoftext|>"
