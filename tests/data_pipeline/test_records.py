"""Records of JSON and Parquet: their text, loss masks, and that nothing is dropped silently."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from texts import decoded, prepared

from jaxpipe.config import ConfigError
from jaxpipe.data.prepare.records import HARMLESS, Passages, RecordConverter
from jaxpipe.data.shards.token_files import open_documents

pytestmark = pytest.mark.usefixtures("in_process")

USER, CALL = {"role": "user", "content": "hi"}, {"function": {"name": "f", "arguments": "{}"}}


def says(content: Any = "yo", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def counted(passages: Passages) -> str:
    return "".join(text for text, counts in passages if counts)


def whole(passages: Passages) -> str:
    return "".join(text for text, _ in passages)


HI = "<|im_start|>user\nhi<|im_end|>\n"
YO = "<|im_start|>assistant\nyo<|im_end|>\n"
ENDED = "yo<|im_end|>\n"

FORMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "weight 0": ({"messages": [USER, says(weight=0)]}, HI + YO, ""),
    "weight 1": ({"messages": [USER, says(weight=1)]}, HI + YO, ENDED),
    "train": ({"messages": [says(train=False), USER, says(train=True)]}, YO + HI + YO, ENDED),
    "loss": ({"messages": [says(loss=False), USER, says(loss=None)]}, YO + HI + YO, ENDED),
    "a user's turn that counts": (
        {"messages": [USER | {"train": True}, says(train=False)]},
        HI + YO,
        "hi<|im_end|>\n",
    ),
    "parts": (
        {"messages": [USER, says([{"type": "text", "text": t} for t in ("y", "o")])]},
        HI + YO,
        ENDED,
    ),
    "parts of Parquet": (
        {"messages": [USER, says([{"type": "text", "text": "yo", "image_url": None}])]},
        HI + YO,
        ENDED,
    ),
    "conversations": (
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
        HI + YO,
        ENDED,
    ),
    "prompt and completion": ({"prompt": [USER], "completion": [says()]}, HI + YO, ENDED),
    "an answer in the prompt": (
        {"prompt": [says(), USER], "completion": [says()]},
        YO + HI + YO,
        ENDED,
    ),
    "nothing in them": (
        {"messages": [USER, says(tool_calls=None, reasoning_content="")], "tools": [], "id": 7},
        HI + YO,
        ENDED,
    ),
    "nothing at all": ({"messages": None}, "", ""),
    "null text": ({"text": None, "other": 1}, "", ""),
    "null among others": ({"text": None, "messages": [USER, says()]}, HI + YO, ENDED),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_messages(form: str) -> None:
    record, text, counts = FORMS[form]
    passages = RecordConverter().passages(record)
    assert (whole(passages), counted(passages)) == (text, counts)


LOST: dict[str, tuple[dict[str, Any], str]] = {
    "tool_calls": ({"messages": [USER, says("x", tool_calls=[CALL])]}, "message 2.*'tool_calls'"),
    "null content": ({"messages": [says(None, tool_calls=[CALL])]}, "message 1.*'tool_calls'"),
    "null alone": ({"messages": [says(None)]}, "message 1: its field 'content' is null"),
    "no content": ({"messages": [{"role": "user"}]}, "message 1: it has no field 'content'"),
    "tools": ({"messages": [USER, says()], "tools": [CALL]}, "'tools' beside its messages"),
    "functions": ({"messages": [USER, says()], "functions": [CALL]}, "'functions'"),
    "system": ({"conversations": [USER, says()], "system": "be"}, "'system'"),
    "reasoning": ({"messages": [says(reasoning_content="hm")]}, "'reasoning_content'"),
    "thinking": ({"messages": [says(thinking="hm")]}, "'thinking'"),
    "weight of a record": ({"messages": [says()], "weight": 0}, "'weight' beside its messages"),
    "half a weight": ({"messages": [says(weight=0.5)]}, "'weight': 0.5.* neither 0 nor 1"),
    "two switches": ({"messages": [says(weight=0, train=True)]}, "'train': True.* neither"),
    "image": (
        {"messages": [says([{"type": "image_url", "image_url": {"url": "x"}}])]},
        r"a part of its content is not like .*, but \{'type': 'image_url', ",
    ),
    "name": (
        {"messages": [USER | {"name": "Ann"}, says()]},
        "message 1: it has 'name', which would",
    ),
    "role": ({"messages": [{"role": "bot", "content": "yo"}]}, "role 'bot' is none of system,"),
    "two of them": ({"messages": [USER], "conversations": [USER]}, "'conversations' beside"),
    "text too": ({"messages": [USER], "text": "hi"}, "'text' beside its messages"),
    "text and prompt": (
        {"text": "ab", "prompt": "a", "completion": "b"},
        "it has 'text', and 'prompt' and",
    ),
    "tools of a prompt": (
        {"prompt": "a", "completion": "b", "tools": [CALL]},
        "'tools' beside its prompt",
    ),
    "text and messages": ({"prompt": "a", "completion": [says()]}, "field 'completion' is no str"),
    "half an answer": ({"prompt": "a", "completion": None}, "field 'completion' is null"),
    "bytes": ({"text": b"a"}, "field 'text' is binary, no text: cast"),
    "nan": ({"text": float("nan")}, "field 'text' is no string"),
    "weight of a text": ({"text": "a", "weight": 0}, "it has 'weight' beside its text, which"),
    "mask of a text": ({"text": "a", "loss_mask": [0]}, "it has 'loss_mask' beside its text"),
    "alpaca": ({"instruction": "a", "output": "b"}, "no field 'text', but 'instruction', 'output'"),
}


@pytest.mark.parametrize("name", LOST)
def test_what_would_be_lost_is_refused_by_name(name: str) -> None:
    record, sentence = LOST[name]
    with pytest.raises(ValueError, match=sentence):
        RecordConverter().passages(record)


def test_what_would_be_lost_can_be_ignored_and_what_is_harmless_is() -> None:
    record = {"messages": [USER, says(tool_calls=[CALL])], "tools": [CALL]}
    ignoring = RecordConverter(ignored=frozenset({"tools", "tool_calls"}))
    assert whole(ignoring.passages(record)) == HI + YO
    known = dict.fromkeys(HARMLESS, "x")
    message = known | USER | {"name": ""}
    assert whole(RecordConverter().passages({"messages": [message], **known})) == HI


def test_a_field_may_be_nested_and_hold_messages() -> None:
    assert RecordConverter("a.b").passages({"a": {"b": "text"}}) == [("text", True)]
    assert RecordConverter("a.b").passages({"a.b": "text"}) == [("text", True)]
    assert RecordConverter("a.b").passages({"a": None}) == []
    assert whole(RecordConverter("chosen").passages({"chosen": [USER, says()]})) == HI + YO
    with pytest.raises(ValueError, match=r"'rejected' beside its messages"):
        RecordConverter("chosen").passages({"chosen": [USER], "rejected": [USER]})
    with pytest.raises(ValueError, match=r"no field 'a\.c', but 'a'"):
        RecordConverter("a.c").passages({"a": {"b": "text"}})


def test_the_end_counts_only_where_the_last_turn_does(tmp_path: Path) -> None:
    records = [
        {"messages": [says(), USER]},
        {"messages": [USER, says()]},
        {"messages": [USER, says(weight=0)]},
        {"prompt": "a", "completion": ""},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    manifest = prepared([tmp_path / "a.jsonl"], tmp_path / "out")
    documents = open_documents(str(tmp_path / "out"), 256)
    learned = [documents.tokens(i)[documents.counted(i)].astype("u1").tobytes() for i in range(3)]
    assert learned == [ENDED.encode(), ENDED.encode() + b"\0", b"\0"]
    assert (manifest.documents, manifest.unlearned, manifest.empty) == (3, 1, 0)
    (tmp_path / "b.jsonl").write_text(json.dumps(records[2]))
    with pytest.raises(ConfigError, match=r"no text that counts in the loss in the inputs of"):
        prepared([tmp_path / "b.jsonl"], tmp_path / "none")


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", ["a.json", "A.JSON", "a.json.gz"])
def test_an_array_is_its_elements(tmp_path: Path, name: str, indent: int | None) -> None:
    records = [{"text": "one ] , [", "x": [1, {"y": '\\"'}]}, {"text": "zwei\n"}, "three"]
    content = b"\xef\xbb\xbf \n" + json.dumps(records, indent=indent).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    prepared([path], tmp_path / "out", piece_size=5)
    assert decoded(tmp_path / "out") == ["one ] , [", "zwei\n", "three"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('[\n{"text": "a"},\n{"body": "b"}\n]', r"a\.json, line 3, is no document: .*'text'"),
        ('[\n{"text": "a"},\n{"text": ]', r"a\.json is no array of JSON from line 3 on \(.+\): c"),
        ('[\n{"text": "a"}\n{"text": "b"}]', r"from line 2 on \(the array does not end"),
        ('[{"text": "a"}', r"from line 1 on \(the array does not end"),
        ('[{"text": "a"}]\n[]', r"from line 1 on \(the array does not end"),
        ('[{"text": "a"},]', r"from line 1 on"),
        ("[]", r"there is no text"),
        ("[" * 200_000, r"from line 1 on"),
    ],
)
def test_faults_of_arrays_are_sentences(tmp_path: Path, content: str, sentence: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ConfigError, match=sentence):
        prepared([tmp_path / "a.json"], tmp_path / "out")


def test_bom_and_capitals_and_nan(tmp_path: Path) -> None:
    bom = b"\xef\xbb\xbf"
    line = b'{"text": "a", "x": NaN, "y": [-Infinity]}\n'
    (tmp_path / "a.JSONL").write_bytes(bom + line + bom + line)
    (tmp_path / "b.jsonl.GZ").write_bytes(gzip.compress(bom + line))
    (tmp_path / "c.txt").write_bytes(bom + b"b\xef\xbb\xbf")
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(bom + b"c"))
    names = ["a.JSONL", "b.jsonl.GZ", "c.txt", "d.txt.gz"]
    prepared([tmp_path / name for name in names], tmp_path / "out")
    assert decoded(tmp_path / "out") == ["a", "a", "a", "b\ufeff", "c"]


def test_half_a_surrogate_pair_and_a_deep_nest_are_no_documents(tmp_path: Path) -> None:
    for number, line in enumerate(
        (r'{"text": "\ud83d", "x": NaN}', '{"text": "a", "x": ' + "[" * 200_000)
    ):
        (tmp_path / "a.jsonl").write_text(line)
        with pytest.raises(ConfigError, match=r"a\.jsonl, line 1, is no document: .{9,200};"):
            prepared([tmp_path / "a.jsonl"], tmp_path / f"out{number}")


def test_parquet_with_nested_and_null_text_and_messages(tmp_path: Path) -> None:
    path = tmp_path / "a.PARQUET"
    nested = [{"text": "a"}, None, {"text": None}, {"text": "b"}]
    pyarrow.parquet.write_table(pyarrow.table({"meta": nested, "n": range(4)}), path)
    manifest = prepared([path], tmp_path / "nested", field="meta.text")
    assert (decoded(tmp_path / "nested"), manifest.empty) == (["a", "b"], 2)
    with pytest.raises(ConfigError, match=r"row 1, .* no field 'meta\.body'"):
        prepared([path], tmp_path / "none", field="meta.body")

    pyarrow.parquet.write_table(pyarrow.table({"text": [b"a"]}), path)
    with pytest.raises(ConfigError, match=r"row 1, is no document: its field 'text' is binary"):
        prepared([path], tmp_path / "none")

    turns = [[USER, says(weight=0)], None, [says(weight=1), USER]]
    table = pyarrow.table({"messages": turns, "tools": [None, None, None], "source": ["x"] * 3})
    pyarrow.parquet.write_table(table, path)
    manifest = prepared([path], tmp_path / "chats")
    assert (manifest.documents, manifest.empty, manifest.unlearned) == (1, 1, 1)
    assert decoded(tmp_path / "chats") == [YO + HI]
    pyarrow.parquet.write_table(pyarrow.table({"messages": turns, "tools": ["f"] * 3}), path)
    with pytest.raises(ConfigError, match=r"row 1, is no document: it has 'tools' beside"):
        prepared([path], tmp_path / "none")
    assert prepared([path], tmp_path / "ignored", ignored=("tools",)).documents == 1


def test_files_of_other_kinds_beside_records_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from jaxpipe.data.__main__ import main

    (tmp_path / "in" / "data").mkdir(parents=True)
    table = pyarrow.table({"text": ["a"]})
    pyarrow.parquet.write_table(table, tmp_path / "in" / "data" / "a.parquet")
    (tmp_path / "in" / "README.md").write_text("# card")
    words = ["--tokenizer", "bytes", "--out", str(tmp_path / "out"), "--workers", "1"]
    assert main(["prepare", str(tmp_path / "in"), *words]) == 0
    assert "README.md; name those to read" in capsys.readouterr().out.replace("\n", "")
    assert decoded(tmp_path / "out") == ["a"]
    prepared([tmp_path / "in", tmp_path / "in" / "README.md"], tmp_path / "both")
    assert decoded(tmp_path / "both") == ["a", "# card"]
