"""Chat templates of strangers end in time and memory; prepared folders keep date and template."""

import json
from pathlib import Path

import pytest
from texts import CHAT, lines, prepared
from tokenizer_folders import folder, write

from jaxpipe.config import ConfigError
from jaxpipe.data.prepare import chat_templates, journal
from jaxpipe.data.prepare.chat_templates import ChatTemplate, load_chat_template
from jaxpipe.data.prepare.limits import bounded
from jaxpipe.data.prepare.records import ChatMessage, ChatML
from jaxpipe.data.shards.manifest import JOURNAL, MANIFEST
from jaxpipe.tokenizer.files import TokenizerFiles

HELLO = [ChatMessage({"role": "user", "content": "hello"}, counts=False)]
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = "{% set n = namespace(x='a') %}" + "{% set n.x = n.x ~ n.x %}" * 40 + "{{ n.x }}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (LOOP, "takes more than"),
        ("{{ 'a' * 9000000000 }}", "MemoryError"),
        ("{{ messages[0].content * 9000000000 }}", "MemoryError"),
        ("{{ 'a' | center(9000000000) }}", "MemoryError"),
        (DOUBLED, "MemoryError|takes more than"),
        ("{{ 10 ** (10 ** 10) }}", "too large"),
        ("{{" + "(" * 5000 + ")" * 5000 + "}}", "cannot be compiled"),
    ],
)
def test_a_template_has_limits(
    monkeypatch: pytest.MonkeyPatch, template: str, message: str
) -> None:
    monkeypatch.setattr(chat_templates, "_SECONDS", 1.0)
    with pytest.raises((ValueError, ConfigError), match=message):
        ChatTemplate({"default": template}, {}).prompt(HELLO)


def test_limits_end_with_the_body() -> None:
    with pytest.raises(MemoryError), bounded(5.0, 1 << 28):
        bytes(1 << 30)
    assert len(bytes(1 << 29)) == 1 << 29


def test_chatml_as_a_template_writes_the_same() -> None:
    template = ChatTemplate(chat_templates.sources_of(ChatML()), {})
    messages = [ChatMessage(m, counts=m["role"] == "assistant") for m in CHAT["messages"]]
    text = ["".join(text for text, _ in one.write(messages, [])) for one in (template, ChatML())]
    assert text[0] == text[1]
    assert template.prompt(messages[:1]) == text[0][: text[0].index("yo")]


DATED = "{% for m in messages %}{{ strftime_now('%d.%m.%Y') }}{{ m.content }}{% endfor %}"


def chats(tmp_path: Path, template: str) -> tuple[Path, list[Path]]:
    model = write(folder({"chat_template": template, "eos_token": "</s>"}), tmp_path / "model")
    inputs = [tmp_path / f"{number}.jsonl" for number in range(3)]
    for path in inputs:
        path.write_bytes(lines([CHAT]))
    return model, inputs


@pytest.mark.usefixtures("in_process")
def test_a_preparation_has_one_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is stopped and goes on the next day writes the date of its start."""
    model, inputs = chats(tmp_path, DATED)
    options = {"tokenizer": str(model), "chat": True, "piece_size": 1}
    good = inputs[2].read_bytes()
    inputs[2].write_text("{")
    with pytest.raises(ConfigError, match="is no document"):
        prepared(inputs, tmp_path / "out", date="2024-02-29", **options)
    assert journal.read_date(tmp_path / "out") == "2024-02-29"
    inputs[2].write_bytes(good)
    before = (tmp_path / "out" / "000000.bin").stat().st_mtime_ns
    manifest = prepared(inputs, tmp_path / "out", **options)
    assert manifest.date == "2024-02-29"
    assert (tmp_path / "out" / "000000.bin").stat().st_mtime_ns == before
    assert not (tmp_path / "out" / JOURNAL).exists()
    whole = prepared(inputs, tmp_path / "whole", date="2024-02-29", **options)
    assert [one.digest for one in manifest.shards] == [one.digest for one in whole.shards]
    assert prepared(inputs, tmp_path / "out", **options) == manifest
    with pytest.raises(ConfigError, match="was prepared of others"):
        prepared(inputs, tmp_path / "out", date="2024-03-01", **options)
    template = load_chat_template(str(model), "2024-02-29")
    assert template.prompt(HELLO) == "29.02.2024hello"


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("chat", [True, False])
def test_a_prepared_folder_keeps_the_template(tmp_path: Path, chat: bool) -> None:
    """That of the tokenizer, or ChatML where messages were written so."""
    model, inputs = chats(tmp_path, "{% for m in messages %}<{{ m.content }}{% endfor %}")
    tokenizer = str(model) if chat else "bytes"
    manifest = prepared(inputs, tmp_path / "out", tokenizer=tokenizer, chat=chat)
    assert manifest.chats == 3
    kept = load_chat_template(TokenizerFiles.read(tmp_path / "out"))
    assert kept.prompt(HELLO) == (
        "<hello" if chat else "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert json.loads((tmp_path / "out" / MANIFEST).read_text())["date"]


@pytest.mark.usefixtures("in_process")
def test_bytes_have_no_nul(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines([{"text": "a"}, {"text": "b\0c"}]))
    with pytest.raises(ConfigError, match=r"line 2, is no document: its text has '\\x00', which"):
        prepared([path], tmp_path / "out")
    assert prepared([path], tmp_path / "out", skip_bad_lines=True).bad_lines == 1
    assert prepared([path], tmp_path / "other", eod="none").documents == 2
