"""Write conversations by a tokenizer's own chat template, and find the text that counts.

A chat template is Jinja. It sees what transformers gives it: `messages`, `tools`, `documents`
(none), `add_generation_prompt` and the special tokens by name, `raise_exception`, `strftime_now`,
`tojson` without HTML escapes, loop controls, and the tag `{% generation %}`.

Source: transformers, `utils/chat_template_utils.py`.
"""

import json
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from jaxpipe.config import ConfigError, first_line
from jaxpipe.data.optional import import_optional
from jaxpipe.data.records import ChatMessage, ConversationWriter, Passages
from jaxpipe.data.tokenizing import (
    BYTES,
    TOKENIZER_CONFIG,
    Tokenizer,
    read_json,
    tokenizer_file,
)

_TEMPLATE, _MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
_PROCESSOR_TEMPLATE = "chat_template.json"
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# `{% generation %}` writes these marks around its text. They are random: no document has them.
_BEGIN, _END = (f"<{edge}{secrets.token_hex(16)}>" for edge in ("", "/"))
_MARKS = re.compile(f"({_BEGIN}|{_END})")


class ChatTemplate(msgspec.Struct, frozen=True):
    """The chat templates of a tokenizer, as a `ConversationWriter`.

    Attributes:
      sources: Jinja by name: `default`, and perhaps `tool_use` for conversations with tools.
      special_tokens: the text of `bos_token`, `eos_token` and other named tokens.
    """

    sources: dict[str, str]
    special_tokens: dict[str, str]

    def keys(self, has_tools: bool) -> frozenset[str]:
        """Return the names of variables and keys that the template reads."""
        return _compile(self._source(has_tools)).names

    def write(self, messages: list[ChatMessage], tools: list[Any]) -> Passages:
        """Write a conversation, in which the text of `{% generation %}` counts.

        In a template without that tag the text of a message starts where the messages before it
        end, generation prompt included, and ends where the messages up to it do.

        Raises `ValueError` where the template refuses the conversation, or does not show which text
        belongs to a message that counts.
        """
        template = _compile(self._source(bool(tools)))
        render = partial(_render, template.template, self._variables(tools))
        find = _passages_by_tag if template.has_generation_tag else _passages_by_prefixes
        return [passage for passage in find(messages, render) if passage[0]]

    def prompt(self, messages: list[ChatMessage]) -> str:
        """Write a conversation up to where the text of the assistant's next message begins.

        Raises `ValueError` where the template refuses the conversation.
        """
        template = _compile(self._source(has_tools=False)).template
        text = _render(template, self._variables([]), messages, generation_prompt=True)
        return _MARKS.sub("", text)

    def _variables(self, tools: list[Any]) -> dict[str, Any]:
        return self.special_tokens | {"tools": tools or None, "documents": None}

    def _source(self, has_tools: bool) -> str:
        default = self.sources["default"]
        return self.sources.get("tool_use", default) if has_tools else default


class _Renderer(Protocol):
    def __call__(self, messages: list[ChatMessage], generation_prompt: bool = False) -> str: ...


def _render(
    template: Any,
    variables: dict[str, Any],
    messages: list[ChatMessage],
    generation_prompt: bool = False,
) -> str:
    """Return the text of messages. Raises `ValueError` where the template raises anything."""
    try:
        return template.render(
            messages=[message.values for message in messages],
            add_generation_prompt=generation_prompt,
            **variables,
        )
    except Exception as error:  # templates raise TemplateError, and what their expressions raise
        raise ValueError(
            f"the chat template refuses its first {len(messages)} messages ({first_line(error)})"
        ) from error


def _passages_by_tag(messages: list[ChatMessage], render: _Renderer) -> Iterator[tuple[str, bool]]:
    parts = _MARKS.split(render(messages))
    flags = [True] * parts.count(_BEGIN)
    if any(message.counts != message.is_reply for message in messages):
        replies = [message.counts for message in messages if message.is_reply]
        if len(replies) != len(flags) or sum(replies) < sum(message.counts for message in messages):
            raise ValueError(
                f"some of its messages are switched, and {len(flags)} blocks of {{% generation %}} "
                f"do not show their text: they must be its {len(replies)} assistant's messages, "
                f"and no other message may count"
            )
        flags = replies
    blocks, counts = iter(flags), False
    for part in parts:
        if part in (_BEGIN, _END):
            counts = part == _BEGIN and next(blocks)
        else:
            yield part, counts


def _passages_by_prefixes(
    messages: list[ChatMessage], render: _Renderer
) -> Iterator[tuple[str, bool]]:
    text, position = render(messages), 0
    for number, message in enumerate(messages):
        if not message.counts:
            continue
        before = render(messages[:number], generation_prompt=message.is_reply)
        through = render(messages[: number + 1])
        if not position <= len(before) <= len(through) or not all(
            map(text.startswith, (before, through))
        ):
            raise ValueError(
                f"the chat template writes the messages up to number {number + 1} otherwise if "
                f"others follow, so that the text of that message is unknown: put "
                f"{{% generation %}} around the assistant's text in the template"
            )
        yield text[position : len(before)], False
        yield text[len(before) : len(through)], True
        position = len(through)
    yield text[position:], False


@dataclass(frozen=True)
class _Compiled:
    """A compiled template.

    Attributes:
      template: a `jinja2.Template`.
      names: of variables, attributes and keys that it reads, and its other constant strings.
      has_generation_tag: whether it has `{% generation %}`.
    """

    template: Any
    names: frozenset[str]
    has_generation_tag: bool


@lru_cache(maxsize=4)
def _compile(source: str) -> _Compiled:
    """Compile a template. Raises `ConfigError` where it is no Jinja."""
    jinja2 = import_optional("jinja2", "a chat template")
    environment = _environment()
    try:
        template, tree = environment.from_string(source), environment.parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the tokenizer's chat template is wrong in line {error.lineno} ({first_line(error)}): "
            f"correct it."
        ) from error
    names = import_optional("jinja2.meta", "a chat template").find_undeclared_variables(tree)
    names |= {node.attr for node in tree.find_all(jinja2.nodes.Getattr)}
    names |= {node.value for node in tree.find_all(jinja2.nodes.Const) if type(node.value) is str}
    return _Compiled(template, frozenset(names), bool(_GENERATION_TAG.search(source)))


def _environment() -> Any:
    """Return the sandbox of transformers, where `{% generation %}` writes marks."""
    jinja2 = import_optional("jinja2", "a chat template")
    extensions = import_optional("jinja2.ext", "a chat template")
    sandbox = import_optional("jinja2.sandbox", "a chat template")

    class Generation(extensions.Extension):
        tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            call = self.call_method("_mark")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, extensions.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def find_end_of_turn(writer: ConversationWriter, tokenizer: Tokenizer) -> int | None:
    """Return the special token that ends the assistant's messages; None: none does.

    A model that is trained on such conversations ends its replies with it.
    """
    question = ChatMessage({"role": "user", "content": "question"}, counts=False)
    reply = ChatMessage({"role": "assistant", "content": "reply"}, counts=True)
    try:
        passages = writer.write([question, reply], [])
    except ValueError:
        return None
    learned = "".join(text for text, counts in passages if counts)
    [after] = tokenizer.encode([[(learned.rpartition("reply")[2], True)]])
    return next((token for token in after.ids.tolist() if tokenizer.mark_of(token)), None)


def find_chat_template(name: str) -> Path | None:
    """Return the file with the chat template of a tokenizer, if it has one."""
    if name == BYTES:
        return None
    folder = tokenizer_file(name).parent
    for file in (folder / _TEMPLATE, folder / _PROCESSOR_TEMPLATE, folder / TOKENIZER_CONFIG):
        if file.suffix == ".jinja" and file.exists():
            return file
        if file.suffix == ".json" and read_json(file).get("chat_template"):
            return file
    return None


def load_chat_template(name: str) -> ChatTemplate:
    """Load the chat template of a tokenizer, whose name is as for `load_tokenizer`.

    Raises `ConfigError` where there is none, or it is no Jinja.
    """
    file = find_chat_template(name)
    if file is None:
        raise ConfigError(
            f"the tokenizer {name} has no chat template: give one that has {_TEMPLATE} or "
            f"chat_template in {TOKENIZER_CONFIG}, or leave out --chat, which writes ChatML."
        )
    folder = file.parent
    if file.suffix == ".jinja":
        more = sorted((folder / _MORE_TEMPLATES).glob("*.jinja"))
        sources = {path.stem: path.read_text("utf-8") for path in more}
        sources["default"] = file.read_text("utf-8")
    else:
        templates = read_json(file)["chat_template"]
        if isinstance(templates, str):
            templates = [{"name": "default", "template": templates}]
        try:
            sources = {str(one["name"]): str(one["template"]) for one in templates}
        except (TypeError, KeyError):
            sources = {}
    if "default" not in sources:
        raise ConfigError(f"{file} has no chat template with the name default: name one so.")
    named = read_json(folder / "special_tokens_map.json") | read_json(folder / TOKENIZER_CONFIG)
    tokens = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in named.items()
        if key.endswith("_token") and isinstance(value, str | dict)
    }
    template = ChatTemplate(sources, tokens)
    for has_tools in (False, True):
        template.keys(has_tools)  # compiles it
    return template
