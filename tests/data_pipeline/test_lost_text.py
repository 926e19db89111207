"""What a chat template does not write is refused by name, and what it writes is not."""

from typing import Any

import pytest

from jaxpipe.data.prepare.chat_templates import ChatTemplate
from jaxpipe.data.prepare.records import RecordConverter

USER, YO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": f"does {name}"}}


ROLES = (
    "{% for m in messages %}{% if m.role in ['user', 'system'] %}[{{ m.role }}]{{ m.content }}"
    "{% elif m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endif %}{% endfor %}"
)
FIRST_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' %}{% elif m.role == 'user' %}"
    "[U]{{ m.content | trim }}"
    "{% else %}{% generation %}{{ m.content | trim | upper }}{% endgeneration %}{% endif %}"
    "{% endfor %}"
)
CALLS = (  # content or calls; only the first two calls; tools only with a system message
    "{% if messages[0].role == 'system' %}{% for t in tools or [] %}{{ t.function.name }}"
    "{% endfor %}{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.tool_calls %}{% for c in m.tool_calls[:2] %}{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% else %}{{ m.content }}{% endif %}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
# The reasoning of all but the last reply is dropped, in its own key or before </think>; the names
# of users are written.
THINKING = (
    "{% for m in messages %}{% set c = m.content %}{% if m.role == 'assistant' %}{% generation %}"
    "{% if not loop.last and '</think>' in c %}{% set c = c.split('</think>')[-1] %}{% endif %}"
    "{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ c | trim }}{% endgeneration %}{% else %}{{ m.role }}: {% if m.role == 'user' %}"
    "{{ m.name }}{% endif %}{{ c }}{% endif %}{% endfor %}"
)
PREFIXES = "{% for m in messages if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}{% endfor %}"

SYSTEM = {"role": "system", "content": "be"}
LOST: dict[str, tuple[str, dict[str, Any], str]] = {
    **{
        role: (ROLES, {"messages": [USER, {"role": role, "content": "S"}, YO]},
               f"its message 2: .* does not write its content in the role '{role}'")
        for role in ("developer", "observation", "function_call", "tool", "ipython")
    },
    "a second system message": (
        FIRST_SYSTEM, {"messages": [SYSTEM, USER, SYSTEM, YO]}, "message 3: .* its content in",
    ),
    "content beside calls": (
        CALLS, {"messages": [USER, YO | {"tool_calls": [call("f", a=1)]}]}, "message 2: .*its con",
    ),
    "a third call": (
        CALLS, {"messages": [USER, {"role": "assistant", "tool_calls": [call(n) for n in "fgh"]}]},
        r"message 2: .* does not write its tool_calls\.2\.function\.name in",
    ),
    "a tool": (
        CALLS, {"messages": [USER, YO], "tools": [tool("f")]}, r"its tool 1: .* function\.name$",
    ),
    "reasoning in the user's turn": (
        THINKING, {"messages": [USER | {"reasoning_content": "R"}, YO]}, "1: .*its reasoning_conte",
    ),
    "a name of the assistant": (
        THINKING, {"messages": [USER, YO | {"name": "Bo"}]}, "message 2: .* not write its name in",
    ),
    "without a tag": (
        PREFIXES, {"messages": [USER, {"role": "tool", "content": "3"}, YO]}, "message 2: .*conten",
    ),
}  # fmt: skip


def write(template: str, record: dict[str, Any], **options: Any) -> str:
    writer = ChatTemplate({"default": template}, {})
    return "".join(text for text, _ in RecordConverter(writer=writer, **options).passages(record))


@pytest.mark.parametrize("name", LOST)
def test_what_a_template_does_not_write_is_refused_by_name(name: str) -> None:
    template, record, sentence = LOST[name]
    with pytest.raises(ValueError, match=sentence):
        write(template, record)


def says(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


WRITTEN: dict[str, tuple[str, list[dict[str, Any]], str]] = {
    "all": (ROLES, [SYSTEM, SYSTEM, USER, YO], "[system]be[system]be[user]hiyo"),
    "twice the same": (ROLES, [USER, YO, USER, YO], "[user]hiyo[user]hiyo"),
    "changed": (FIRST_SYSTEM, [SYSTEM, USER, YO], "be[U]hiYO"),
    "blanks": (FIRST_SYSTEM, [USER | {"content": " \n"}, YO], "[U]YO"),
    "nothing": (ROLES, [USER, {"role": "tool", "content": ""}, YO], "[user]hiyo"),
    "calls": (CALLS, [USER, says("", tool_calls=[call("f", a=1), call("g")])], 'hif{"a": 1}g{}'),
    "arguments alone": (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}",
        [USER, says("", tool_calls=[call("f", a=1)])], 'hi{"a": 1}',
    ),
    "null beside calls": (CALLS, [USER, says(None, tool_calls=[call("f", a=None)])],
                          'hif{"a": null}'),
    "earlier reasoning": (
        THINKING,
        [USER, says("yo", reasoning_content="A"), USER, says("no", reasoning_content="B")],
        "user: hiyouser: hi<think>B</think>no",
    ),
    "earlier reasoning in the content": (
        THINKING,
        [USER, says("<think>A</think>yo"), USER, says("<think>B</think>no")],
        "user: hiyouser: hi<think>B</think>no",
    ),
    "names": (THINKING, [USER | {"name": "Ann "}, YO], "user: Ann hiyo"),
    "the name of a tool": (
        THINKING, [USER, {"role": "tool", "content": "3", "name": "f"}, YO], "user: hitool: 3yo",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_template_writes_is_not_refused(name: str) -> None:
    template, messages, text = WRITTEN[name]
    assert write(template, {"messages": messages}) == text


def test_what_would_be_lost_can_be_ignored() -> None:
    messages = [USER | {"reasoning_content": "R"}, YO]
    text = write(THINKING, {"messages": messages}, ignored=frozenset({"reasoning_content"}))
    assert text == "user: hiyo"


def test_marks_cost_one_more_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation is written twice where each text is found by its mark."""
    from jaxpipe.data.prepare import chat_templates

    renders, render = [], chat_templates._render
    monkeypatch.setattr(
        chat_templates, "_render", lambda *words: renders.append(1) or render(*words)
    )
    write(ROLES, {"messages": [SYSTEM, *[USER, YO] * 20]})
    assert len(renders) == 2
