"""Conversations written by chat templates: their ids and loss masks are those of transformers.

`tests/data/chat_templates` has a template in the style of each of several models, and `CHAT` as it
writes it, with the text that counts in brackets.
"""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import prepared

from jaxpipe.config import ConfigError
from jaxpipe.data.packing import pack_documents
from jaxpipe.data.prepare.chat_templates import ChatTemplate, load_chat_template
from jaxpipe.data.prepare.records import ChatMessage, Passages, RecordConverter
from jaxpipe.data.prepare.tokenizing import load_tokenizer
from jaxpipe.data.samples import PackedSamples
from jaxpipe.data.shards.token_files import open_documents

STORED = Path(__file__).parents[1] / "data" / "chat_templates"
BY_PREFIX = ("chatml", "llama3", "mistral", "deepseek")
STYLES = (*BY_PREFIX, "harmony")  # its last reply ends otherwise, so that prefixes do not show it
ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "mistral": "</s>"}
ENDS |= {"deepseek": "<\uff5cend▁of▁sentence\uff5c>", "harmony": "<|return|>"}
TOKENS = [
    "<s>", *ENDS.values(), "<|im_start|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eom_id|>", "[INST]", "[/INST]", "[TOOL_CALLS]", "<\uff5cUser\uff5c>",
    "<\uff5cAssistant\uff5c>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>",
]  # fmt: skip
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é<"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def says(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CHAT = [
    says("system", "be brief"),
    says("user", " 1 + 1?\n"),
    {"role": "assistant", "tool_calls": [CALL]},
    says("tool", "2"),
    says("assistant", "two "),
    says("user", "日本?"),
    says("assistant", "<think>hm</think>🙂\n\nyes"),
]


def template_of(style: str, *, tagged: bool = True) -> str:
    source = (STORED / f"{style}.jinja").read_text("utf-8")
    if not tagged:
        source = source.replace("endgeneration", "endif").replace("generation %}", "if true %}")
        source = source.replace("generation -%}", "if true -%}")
    return source


def write_model(folder: Path, end: str, template: Any = None) -> Path:
    """Write a tokenizer of bytes and special tokens, with a template in one of two places."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=336,
        special_tokens=TOKENS,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(["user\n\nassistant\n\n yes", "no: 1 + 1\n\n"] * 5, trainer)
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    config["bos_token"] = {"__type": "AddedToken", "content": "<s>", "special": True}
    if template is not None and end == ENDS["llama3"]:
        (folder / "chat_template.jinja").write_text(template, "utf-8")
        template = "not this one"
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return folder


@pytest.fixture(scope="module", params=STYLES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    style = request.param
    folder = tmp_path_factory.mktemp("models") / style
    return write_model(folder, ENDS[style], template_of(style))


def converter(folder: Path, *, tagged: bool = True, **options: Any) -> RecordConverter:
    template = load_chat_template(str(folder))
    if not tagged:
        source = template_of(folder.name, tagged=False)
        template = ChatTemplate({"default": source}, template.special_tokens)
    return RecordConverter(writer=template, only_chats=True, **options)


def flagged(passages: Passages) -> tuple[str, list[bool]]:
    """Return the text, and whether each character counts."""
    return "".join(text for text, _ in passages), [c for text, c in passages for _ in text]


PIECES = [
    "hi", " ", "\n", "é", "日", "🙂", "</think>", "{{ x }}", '"<', "<|im_end|>", "</s>", "[INST]"
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), max_size=4).map("".join)


@st.composite
def conversations(draw: st.DrawFn, calls: bool = True) -> list[dict[str, Any]]:
    messages = [says("system", draw(TEXTS))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append(says("user", draw(TEXTS)))
        if calls and draw(st.booleans()):
            call = {
                "type": "function",
                "function": {"name": draw(TEXTS), "arguments": {draw(TEXTS): 1}},
            }
            messages += [says("assistant", "", tool_calls=[call]), says("tool", draw(TEXTS))]
        messages.append(says("assistant", draw(TEXTS)))
    return messages + ([says("user", draw(TEXTS))] if draw(st.booleans()) else [])


def compare_with_transformers(folder: Path, examples: int) -> None:
    """Compare ids and masks of random conversations, with calls and reasoning that it writes."""
    transformers = pytest.importorskip("transformers")
    library = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer, records = load_tokenizer(str(folder)), converter(folder)
    reads = load_chat_template(str(folder)).keys(has_tools=False)
    tool = {"type": "function", "function": TOOL["function"] | {"description": "a sum"}}

    @settings(max_examples=examples, deadline=None)
    @given(conversations("tool_calls" in reads), st.booleans())
    def compare(messages: list[dict[str, Any]], has_tools: bool) -> None:
        tools = [tool] if has_tools and "tools" in reads else None
        if "thinking" in reads:
            messages = [
                one | ({"thinking": one["content"] + "?"} if one["role"] == "assistant" else {})
                for one in messages
            ]
        theirs = library.apply_chat_template(
            messages,
            tools=tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        record = {"messages": messages} | ({"tools": tools} if tools else {})
        (ours,) = tokenizer.encode([records.passages(record)])
        assert ours.ids.tolist() == theirs["input_ids"]
        assert ours.counted.tolist() == [bool(flag) for flag in theirs["assistant_masks"]]
        assert ours.counted.any()

    compare()


@pytest.mark.parametrize("examples", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_ids_and_masks_are_those_of_transformers(model: Path, examples: int) -> None:
    compare_with_transformers(model, examples)


def test_a_prompt_is_that_of_transformers(model: Path) -> None:
    """It ends where the reply begins; with a reply before it, the template's marks are left out."""
    transformers = pytest.importorskip("transformers")
    library = transformers.AutoTokenizer.from_pretrained(model)
    for messages in ([says("user", "hi")], [*CHAT[-2:], says("user", " and then?")]):
        theirs = library.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ours = [ChatMessage(values, counts=False) for values in messages]
        assert load_chat_template(str(model)).prompt(ours) == theirs


@pytest.mark.parametrize("name", ["qwen2_5", "llama3", "deepseekv3", "gptoss"])
def test_templates_as_published(tmp_path: Path, name: str) -> None:
    """Those that the package trl has, in which it put the tag."""
    if (trl := find_spec("trl")) is None:
        pytest.skip("trl is not installed")
    stored = Path(trl.submodule_search_locations[0]) / "chat_templates" / f"{name}_training.jinja"
    folder = write_model(tmp_path / name, "</s>", stored.read_text("utf-8"))
    compare_with_transformers(folder, 500)


def test_a_conversation_is_written_as_stored(model: Path) -> None:
    passages = converter(model).passages({"messages": CHAT, "tools": json.dumps([TOOL])})
    written = "".join(f"⟦{text}⟧" if counts else text for text, counts in passages)
    assert written == (STORED / f"{model.name}.txt").read_text("utf-8")
    (encoded,) = load_tokenizer(str(model)).encode([passages])
    learned = load_tokenizer(str(model)).decode(encoded.ids[encoded.counted])
    assert learned == "".join(text for text, counts in passages if counts)


@pytest.mark.parametrize("model", BY_PREFIX, indirect=True)
@settings(max_examples=60, deadline=None)
@given(conversations(), st.booleans())
def test_prefixes_find_the_text_of_generation_tags(
    model: Path, messages: list[dict[str, Any]], has_tools: bool
) -> None:
    record = {"messages": messages}
    if has_tools and model.name != "mistral":  # it moves the tools to the last user's message
        record["tools"] = [TOOL]
    text, counted = flagged(converter(model).passages(record))
    assert flagged(converter(model, tagged=False).passages(record)) == (text, counted)
    if model.name == "chatml" and not any(
        {"tools", "tool_calls"} & one.keys() for one in [record, *messages]
    ):
        assert flagged(RecordConverter().passages(record)) == (text, counted)


@pytest.mark.parametrize("model", BY_PREFIX, indirect=True)
@pytest.mark.parametrize("tagged", [True, False])
def test_switches_choose_among_the_assistants_messages(model: Path, tagged: bool) -> None:
    def learned(**record: Any) -> str:
        passages = converter(model, tagged=tagged).passages(record)
        return "".join(text for text, counts in passages if counts)

    end = ENDS[model.name] + ("\n" if model.name == "chatml" else "")
    first = [says("user", "a"), says("assistant", "b")]
    switched = [says("user", "a"), says("assistant", "b", weight=0)]
    last = [says("user", "c"), says("assistant", "d")]
    assert learned(messages=[*first, *last]) == f"b{end}d{end}"
    assert learned(messages=[*switched, *last]) == f"d{end}"
    assert learned(prompt=[*first, last[0]], completion=[last[1]]) == f"d{end}"
    user_too = [says("user", "a", train=True), says("assistant", "b")]
    if tagged or model.name == "mistral":
        reason = "no other message may count" if tagged else "refuses its first 0 messages"
        with pytest.raises(ValueError, match=reason):
            learned(messages=user_too)
    else:
        assert re.search(rf"a.*b{re.escape(end)}$", learned(messages=user_too), re.DOTALL)


PLAIN = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
# Like Qwen3's: reasoning is left out of all replies but the last.
LAST_ONLY = PLAIN.replace(
    "m.content", "(m.content if loop.last else m.content.split('</think>')[-1])"
)
STRICT = (
    "{% for m in messages %}{% if m.role == 'user' and not loop.first %}"
    "{{ raise_exception('one turn only') }}{% endif %}{{ m['content'] }}{% endfor %}"
)
TURNS = [says("user", "a"), says("assistant", "<think>b</think>c")]
REFUSALS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no template": (None, {"messages": TURNS}, r"has no chat template: give one that has chat_t"),
    "no Jinja": ("\n{% for %}", {"messages": TURNS}, r"template is wrong in line 2 \(.*correct it"),
    "no default": ([{"name": "rag", "template": "x"}], {"messages": TURNS}, "the name default"),
    "prefixes": (
        LAST_ONLY,
        {"messages": [*TURNS, *TURNS]},
        r"jsonl, line 1, .* messages up to number 2 otherwise if others follow.*put {% generation",
    ),
    "a role": (STRICT, {"messages": [*TURNS, *TURNS]}, r"4 messages \(one turn only\); correct"),
    "an error": (STRICT, {"messages": [says("user", "a"), {"role": "assistant"}]}, "2.*'content'"),
    "reasoning": (PLAIN, {"messages": [TURNS[0] | {"reasoning_content": "x"}]}, "which would be l"),
    "tools": (PLAIN, {"messages": TURNS, "tools": [TOOL]}, "it has 'tools' beside its messages"),
    "no tools": ("{{ tools }}", {"messages": TURNS, "tools": "[1]"}, "tools are no list of obj"),
    "text": (PLAIN, {"text": "a"}, "field 'text' is text, but --chat reads messages only: prepare"),
    "sandbox": (
        "{{ messages.append(1) }}{{ ''.__class__ }}",
        {"messages": TURNS},
        r"refuses its first 2 messages \(access to attribute 'append' of 'list'",
    ),
}


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("name", REFUSALS)
def test_what_a_template_cannot_write_is_refused(tmp_path: Path, name: str) -> None:
    template, record, sentence = REFUSALS[name]
    folder = write_model(tmp_path / "model", "</s>", template)
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=sentence):
        prepared([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer=str(folder), chat=True)


def test_a_template_for_tools_is_used_for_tools_alone(tmp_path: Path) -> None:
    named = {"default": PLAIN, "tool_use": "{{ tools[0].function.name }} of " + PLAIN}
    listed = [{"name": name, "template": source} for name, source in named.items()]
    records = converter(write_model(tmp_path / "model", "</s>", listed))
    turns = [says("human", "a"), says("gpt", "b")]
    assert flagged(records.passages({"messages": turns}))[0] == "useraassistantb"
    of_tools = records.passages({"conversations": turns, "tools": [TOOL]})
    assert flagged(of_tools)[0] == "add of useraassistantb"


@pytest.mark.usefixtures("in_process")
def test_conversations_are_prepared_and_pack_as_other_documents(
    model: Path, tmp_path: Path
) -> None:
    records = [{"messages": messages} for messages in (CHAT, CHAT[5:], CHAT[:2])]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    manifest = prepared([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer=str(model), chat=True)
    assert (manifest.documents, manifest.unlearned, manifest.tokenizer.eod) == (2, 1, None)
    assert manifest.end_of_turn == load_tokenizer(str(model)).id_of(ENDS[model.name])
    documents = open_documents(str(tmp_path / "out"), 400)
    encoded = load_tokenizer(str(model)).encode([converter(model).passages(r) for r in records[:2]])
    rows = pack_documents(documents.lengths, int(documents.lengths.sum()), "sequential", most=8)
    sample = PackedSamples(documents, rows, True)[0]
    for number, one in enumerate(encoded):
        assert documents.tokens(number).tolist() == one.ids.tolist()
        assert documents.counted(number).tolist() == one.counted.tolist()
        targets = np.where(one.counted[1:], one.ids[1:], -100)
        np.testing.assert_array_equal(sample["targets"][sample["segments"] == number], targets)
