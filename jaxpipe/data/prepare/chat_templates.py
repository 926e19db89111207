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
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from typing import Any, Protocol

import msgspec

from jaxpipe.config import ConfigError, first_line
from jaxpipe.data.optional import import_optional
from jaxpipe.data.prepare.limits import bounded
from jaxpipe.data.prepare.lost_text import check_written
from jaxpipe.data.prepare.records import ChatMessage, ConversationWriter, Passages
from jaxpipe.data.prepare.tokenizing import Tokenizer
from jaxpipe.tokenizer.files import CONFIG, TEMPLATE, TokenizerFiles
from jaxpipe.tokenizer.tokens import read_tokens

_CHATML = (  # what `records.ChatML` writes
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + "
    "'<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_LONGEST_POWER = 4096  # bits
_SECONDS, _MEMORY = 10.0, 1 << 30  # that a template may take for one conversation, memory in bytes
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# `{% generation %}` writes these marks around its text. They are random: no document has them.
_BEGIN, _END = (f"<{edge}{secrets.token_hex(16)}>" for edge in ("", "/"))
_MARKS = re.compile(f"({_BEGIN}|{_END})")


class ChatTemplate(msgspec.Struct, frozen=True):
    """The chat templates of a tokenizer, as a `ConversationWriter`.

    Attributes:
      sources: Jinja by name: `default`, and perhaps `tool_use` for conversations with tools.
      special_tokens: the text of `bos_token`, `eos_token` and other named tokens.
      date: that `strftime_now` writes, as YYYY-MM-DD; "": the present.
    """

    sources: dict[str, str]
    special_tokens: dict[str, str]
    date: str = ""

    def keys(self, has_tools: bool) -> frozenset[str]:
        """Return the names of variables and keys that the template reads."""
        return _compile(self._source(has_tools)).names

    @property
    def reads_date(self) -> bool:
        """Whether a template writes the present date."""
        return any("strftime_now" in _compile(source).names for source in self.sources.values())

    def write(self, messages: list[ChatMessage], tools: list[Any]) -> Passages:
        """Write a conversation, in which the text of `{% generation %}` counts.

        In a template without that tag the text of a message starts where the messages before it
        end, generation prompt included, and ends where the messages up to it do.

        Raises `ValueError` where the template refuses the conversation, does not write all of it,
        or does not show which text belongs to a message that counts.
        """
        template = _compile(self._source(bool(tools)))
        render = partial(_render, template.template, self._variables(tools))
        with _within_limits():
            text = render([message.values for message in messages])
            check_written(
                messages, tools, text,
                lambda some, tools: _render(template.template, self._variables(tools), some),
            )  # fmt: skip
            find = _passages_by_tag if template.has_generation_tag else _passages_by_prefixes
            return [passage for passage in find(messages, text, render) if passage[0]]

    def prompt(self, messages: list[ChatMessage]) -> str:
        """Write a conversation up to where the text of the assistant's next message begins.

        Raises `ValueError` where the template refuses the conversation.
        """
        template = _compile(self._source(has_tools=False)).template
        values = [message.values for message in messages]
        with _within_limits():
            text = _render(template, self._variables([]), values, generation_prompt=True)
        return _MARKS.sub("", text)

    def _variables(self, tools: list[Any]) -> dict[str, Any]:
        now = datetime.fromisoformat(self.date) if self.date else datetime.now()
        known = {"tools": tools or None, "documents": None, "strftime_now": now.strftime}
        return self.special_tokens | known

    def _source(self, has_tools: bool) -> str:
        default = self.sources["default"]
        return self.sources.get("tool_use", default) if has_tools else default


class _Renderer(Protocol):
    def __call__(self, messages: list[dict[str, Any]], generation_prompt: bool = False) -> str: ...


@contextmanager
def _within_limits() -> Iterator[None]:
    """Raise `ValueError` where the body takes more time or memory than a conversation may."""
    try:
        with bounded(_SECONDS, _MEMORY):
            yield
    except (TimeoutError, MemoryError) as error:
        raise ValueError(
            f"the chat template takes too much for a conversation ({first_line(error)})"
        ) from error


def _render(
    template: Any,
    variables: dict[str, Any],
    messages: list[dict[str, Any]],
    generation_prompt: bool = False,
) -> str:
    """Return the text of messages. Raises `ValueError` where the template raises anything."""
    try:
        return template.render(
            messages=messages,
            add_generation_prompt=generation_prompt,
            **variables,
        )
    except (TimeoutError, MemoryError):  # limits of the whole conversation
        raise
    except Exception as error:  # templates raise TemplateError, and what their expressions raise
        raise ValueError(
            f"the chat template refuses its first {len(messages)} messages ({first_line(error)})"
        ) from error


def _passages_by_tag(
    messages: list[ChatMessage], text: str, _: _Renderer
) -> Iterator[tuple[str, bool]]:
    parts = _MARKS.split(text)
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
    messages: list[ChatMessage], text: str, render: _Renderer
) -> Iterator[tuple[str, bool]]:
    values, position = [message.values for message in messages], 0
    for number, message in enumerate(messages):
        if not message.counts:
            continue
        before = render(values[:number], generation_prompt=message.is_reply)
        through = render(values[: number + 1])
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
    meta = import_optional("jinja2.meta", "a chat template")
    environment, nodes = _environment(), jinja2.nodes
    try:
        with bounded(_SECONDS, _MEMORY):  # compiling computes constant expressions
            template, tree = environment.from_string(source), environment.parse(source)
            names = meta.find_undeclared_variables(tree)
            names |= {node.attr for node in tree.find_all(nodes.Getattr)}
            names |= {node.value for node in tree.find_all(nodes.Const) if type(node.value) is str}
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the tokenizer's chat template is wrong in line {error.lineno} ({first_line(error)}): "
            f"correct it."
        ) from error
    except Exception as error:  # Python's own compiler and constant expressions raise anything
        raise ConfigError(
            f"the tokenizer's chat template cannot be compiled ({type(error).__name__}: "
            f"{first_line(error)}): correct it."
        ) from error
    return _Compiled(template, frozenset(names), bool(_GENERATION_TAG.search(source)))


def _environment() -> Any:
    """Return the sandbox of transformers, where `{% generation %}` writes marks."""
    jinja2 = import_optional("jinja2", "a chat template")
    extensions = import_optional("jinja2.ext", "a chat template")
    extension: Any = extensions.Extension
    sandbox = import_optional("jinja2.sandbox", "a chat template")
    immutable: Any = sandbox.ImmutableSandboxedEnvironment

    class Generation(extension):
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

    class Sandbox(immutable):
        intercepted_binops = frozenset({"**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            """Compute a power, unless it has so many digits that no limit of time stops it."""
            if abs(right) * max(abs(left), 2).bit_length() > _LONGEST_POWER:
                raise OverflowError(f"{left}**{right} is too large")
            return left**right

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, extensions.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
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


def load_chat_template(name: str | TokenizerFiles, date: str = "") -> ChatTemplate:
    """Load the chat template of a tokenizer, whose name is as for `load_tokenizer`.

    `date` is that of `ChatTemplate`. Raises `ConfigError` where there is no template, or it is no
    Jinja.
    """
    files = TokenizerFiles.read(name)
    sources = files.chat_templates
    if not sources:
        raise ConfigError(
            f"the tokenizer {files.place} has no chat template: give one that has {TEMPLATE} or "
            f"chat_template in {CONFIG}, or leave out --chat, which writes ChatML."
        )
    template = ChatTemplate(sources, dict(read_tokens(files).named), date)
    for has_tools in (False, True):
        template.keys(has_tools)  # compiles it
    return template


def sources_of(writer: ConversationWriter) -> dict[str, str]:
    """Return the chat templates, by name, that write what a writer writes."""
    return writer.sources if isinstance(writer, ChatTemplate) else {"default": _CHATML}
