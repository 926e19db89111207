"""Convert records of JSON or rows of tables to passages of text that count in the loss or do not.

    {"text": "..."}                                          all text counts
    {"prompt": "...", "completion": "..."}                   the completion counts
    {"messages": [{"role": "...", "content": "..."}, ...]}   the assistant's messages count

Messages may also be called `conversations`, their keys `from` and `value`; `prompt` and
`completion` may be lists of messages. A `ConversationWriter` writes messages: ChatML, or the chat
template of the tokenizer. A key of a message, or of a record with messages or a prompt, is used,
harmless or refused. A key that could change the training data is dropped only if the user asks for
it.
"""

import json
from dataclasses import dataclass
from typing import Any, Protocol

from jaxpipe.config import ConfigError
from jaxpipe.data.pairs import answers_of

Passages = list[tuple[str, bool]]  # a document's text in passages; whether each counts in the loss
MESSAGES = ("messages", "conversations")
MARKS = ("<|im_start|>", "<|im_end|>")
# Keys with metadata of a record, which do not affect the training data.
HARMLESS = frozenset({
    "id", "idx", "index", "uuid", "hash", "prompt_id", "message_id", "conversation_id",
    "session_id", "tool_call_id", "name", "source", "dataset", "subset", "split", "category",
    "categories", "topic", "title", "tags", "language", "lang", "url", "license", "model",
    "timestamp", "created", "created_at", "date", "metadata", "meta", "score", "rating",
    "num_turns", "num_tokens", "token_count", "finish_reason", "score_chosen", "score_rejected",
})  # fmt: skip
_ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool", "function")}
_ROLES |= {"human": "user", "gpt": "assistant"}
_SWITCHES = ("weight", "train", "loss")  # keys of a message: 1 or true if it counts, 0 or false
# Keys of a record of text that say how much of it counts, unlike those of other metadata.
WEIGHTS = frozenset({*_SWITCHES, "loss_mask", "loss_weight", "sample_weight"})


@dataclass(frozen=True)
class ChatMessage:
    """A message of a conversation."""

    values: dict[str, Any]  # role, content (may be absent beside tool calls) and further keys
    counts: bool  # whether it counts in the loss

    @property
    def is_reply(self) -> bool:
        """Whether it is the assistant's."""
        return self.values["role"] == "assistant"


class ConversationWriter(Protocol):
    """Writes conversations as text."""

    def keys(self, has_tools: bool) -> frozenset[str]:
        """Return the keys, besides role and content, that it writes; `tools` is a record's key."""

    def write(self, messages: list[ChatMessage], tools: list[Any]) -> Passages:
        """Return the passages of a conversation. Raises `ValueError` where it has no such form."""


@dataclass(frozen=True)
class ChatML:
    """Writes `<|im_start|>ROLE\\nCONTENT<|im_end|>\\n`, where text counts from CONTENT on.

    Attributes:
      fault: why the tokenizer cannot encode the marks; empty: it can.
    """

    fault: str = ""

    def keys(self, has_tools: bool) -> frozenset[str]:
        """Return no keys: ChatML has a role and a content only."""
        return frozenset()

    def write(self, messages: list[ChatMessage], tools: list[Any]) -> Passages:
        """Write the messages. Raises `ConfigError` with the fault, if there is one."""
        if self.fault:
            raise ConfigError(self.fault)
        passages = []
        for number, message in enumerate(messages, 1):
            role = message.values["role"]
            if role not in _ROLES:
                raise ValueError(
                    f"its message {number}: its role {role!r} is none of {', '.join(_ROLES)}"
                )
            passages.append((f"{MARKS[0]}{role}\n", False))
            passages.append((f"{message.values['content']}{MARKS[1]}\n", message.counts))
        return passages


@dataclass
class RecordConverter:
    """Converts records to passages.

    Attributes:
      field: the key of the text or messages, may be nested (`a.b`); empty: the usual keys.
      ignored: keys that are dropped although they may change the training data.
      writer: writes messages.
      only_chats: whether records without messages are refused.
      pairs: whether a record has two answers to one prompt.
      reserved: text that no document may have; empty: none.
      chats: number of records with messages so far.
    """

    field: str = ""
    ignored: frozenset[str] = frozenset()
    writer: ConversationWriter = ChatML()
    only_chats: bool = False
    pairs: bool = False
    reserved: str = ""
    chats: int = 0

    def documents(self, record: Any) -> list[Passages]:
        """Return the passages of each document of a record: one, or those of both answers.

        Raises what `passages` does, and `ValueError` for one that is no pair or has `reserved`.
        """
        answers = answers_of(record) if self.pairs else [record]
        documents = [self.passages(answer) for answer in answers]
        if self.reserved and any(self.reserved in text for one in documents for text, _ in one):
            raise ValueError(f"its text has {self.reserved!r}, which ends documents (--eod)")
        return documents

    def passages(self, record: Any) -> Passages:
        """Return the passages of a record; none where its fields are null.

        Raises:
          ValueError: where a required field is missing, or another field would be lost.
          ConfigError: for messages, where the tokenizer cannot encode their form.

        >>> RecordConverter().passages({"prompt": "1 + 1 = ", "completion": "2"})
        [('1 + 1 = ', False), ('2', True)]
        """
        if isinstance(record, str):
            return [self._text(record, "text", True)]
        if not isinstance(record, dict):
            raise ValueError("it is no JSON object")
        name = self.field or next((name for name in MESSAGES if record.get(name) is not None), "")
        has_text = record.get("text") is not None and "text" not in self.ignored
        if not name and has_text and {"prompt", "completion"} <= record.keys() - self.ignored:
            raise ValueError(
                "it has 'text', and 'prompt' and 'completion': --ignore text, or --ignore prompt"
            )
        if not name and not has_text and "prompt" in record:
            return self._answer(record)
        name = name or next((one for one in ("text", *MESSAGES) if one in record), "text")
        value = _read_value(record, name)
        if isinstance(value, list) or name in MESSAGES:
            return self._chat(record, (name.split(".")[0], name), [(value, True)])
        weights = {key: weight for key, weight in record.items() if key in WEIGHTS}
        self._check_lost(weights, (name,), "its text")
        return [] if value is None else [self._text(value, name, True)]

    def _answer(self, record: dict[str, Any]) -> Passages:
        """Return the passages of a prompt and a completion: both text, or both messages."""
        names = ("prompt", "completion")
        prompt, completion = (_read_value(record, name) for name in names)
        if isinstance(prompt, list) and isinstance(completion, list):
            return self._chat(record, names, [(prompt, False), (completion, True)])
        self._check_lost(record, names, "its prompt")
        if prompt is completion is None:
            return []
        return [self._text(prompt, "prompt", False), self._text(completion, "completion", True)]

    def _text(self, value: Any, name: str, counts: bool) -> tuple[str, bool]:
        text = _check_string(value, name)
        if self.only_chats:
            raise ValueError(
                f"its field {name!r} is text, but --chat reads messages only: prepare text without "
                f"it, and mix both as data.sources"
            )
        return text, counts

    def _chat(
        self, record: dict[str, Any], names: tuple[str, ...], parts: list[tuple[Any, bool]]
    ) -> Passages:
        """Write the messages of one or more fields as one conversation.

        Args:
          record: the record.
          names: its keys that hold the messages.
          parts: lists of messages; whether the assistant's messages of a list count, unless a
            message's own switch decides otherwise.
        """
        has_tools = "tools" not in self.ignored and not _is_empty(record.get("tools"))
        read = self.writer.keys(has_tools)
        self._check_lost(record, (*names, *(read & {"tools"})), "its messages")
        tools = _read_tools(record["tools"]) if has_tools else []
        self.chats += 1
        chosen = [(one, counts) for part, counts in parts for one in _check_messages(part)]
        messages = []
        for number, (one, counts) in enumerate(chosen, 1):
            try:
                messages.append(self._message(one, counts, read))
            except ValueError as error:
                raise ValueError(f"its message {number}: {error}") from error
        return self.writer.write(messages, tools) if messages else []

    def _message(self, message: dict[str, Any], counts: bool, read: frozenset[str]) -> ChatMessage:
        """Return a message with the names of its keys that Hugging Face uses.

        Args:
          message: the message of the record.
          counts: whether it counts if it is the assistant's and has no switch of its own.
          read: its keys that are written.
        """
        names = ["from" if "from" in message and "role" not in message else "role"]
        names += ["value" if "value" in message and "content" not in message else "content"]
        harmless = harmless_keys(message.get(names[0]))
        self._check_lost(message, (*names, *_SWITCHES, *read), "it", harmless)
        dropped = self.ignored.union(names, _SWITCHES)
        values = {key: value for key, value in message.items() if key not in dropped}
        role = _read_value(message, names[0])
        if not isinstance(role, str):
            raise ValueError(f"its role {role!r} is no string")
        values["role"] = _ROLES.get(role, role)
        calls = "tool_calls" in read and values.get("tool_calls")
        if message.get(names[1]) is not None or not calls:
            values["content"] = _join_content(_read_value(message, names[1]), names[1])
        elif names[1] in message:
            values["content"] = None
        switches = {name: message[name] for name in _SWITCHES if message.get(name) is not None}
        if any(value not in (0, 1) for value in switches.values()) or len({*switches.values()}) > 1:
            raise ValueError(f"{switches} is neither 0 nor 1, false nor true")
        counts = counts and values["role"] == "assistant"
        return ChatMessage(values, bool(next(iter(switches.values()), counts)))

    def _check_lost(
        self,
        record: dict[str, Any],
        used: tuple[str, ...],
        of: str,
        harmless: frozenset[str] = HARMLESS,
    ) -> None:
        """Raise `ValueError` for non-empty keys that are neither used nor harmless."""
        known = harmless.union(used, self.ignored)
        lost = [key for key, value in record.items() if key not in known and not _is_empty(value)]
        if lost:
            names = ", ".join(map(repr, lost))
            where = f"it has {names}" if of == "it" else f"it has {names} beside {of}"
            raise ValueError(f"{where}, which would be lost")


def harmless_keys(role: Any) -> frozenset[str]:
    """Return the keys of a message that do not affect the training data.

    The name of a tool repeats what the call says, but that of a person says who speaks.
    """
    return HARMLESS if role in ("tool", "function") else HARMLESS - {"name"}


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)


def _read_tools(tools: Any) -> list[Any]:
    """Return the tools of a record: a list of objects, or such a list as JSON text."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise ValueError(f"its tools are no JSON ({error})") from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("its tools are no list of objects")
    return tools


def _check_messages(value: Any) -> list[dict[str, Any]]:
    messages = [] if value is None else value
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise ValueError("its messages are no list of objects")
    return messages


def _read_value(record: dict[str, Any], name: str) -> Any:
    """Return a record's value at a key, or at a path of keys with dots; None for null."""
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        if value is None:
            return None  # the enclosing struct is null
        if not isinstance(value, dict) or part not in value:
            if {"chosen", "rejected"} <= record.keys():
                raise ValueError("it is a pair of answers, which --pairs reads")
            others = ", ".join(map(repr, record)) or "none"
            raise ValueError(f"it has no field {name!r}, but {others}")
        value = value[part]
    return value


def _check_string(value: Any, name: str) -> str:
    if isinstance(value, bytes):
        raise ValueError(f"its field {name!r} is binary, no text: cast the column to string")
    if not isinstance(value, str):
        raise ValueError(f"its field {name!r} is {'null' if value is None else 'no string'}")
    return value


def _join_content(content: Any, name: str) -> str:
    """Return the content of a message, which is text or a list of text parts."""
    if not isinstance(content, list):
        return _check_string(content, name)
    texts = []
    for part in content:
        fields = {k: v for k, v in part.items() if v is not None} if isinstance(part, dict) else {}
        if fields.keys() != {"type", "text"} or fields["type"] != "text":
            raise ValueError(
                f"a part of its {name} is not like {{'type': 'text', 'text': '...'}}, but "
                f"{str(fields or part)[:80]}"
            )
        texts.append(_check_string(fields["text"], "text"))
    return "".join(texts)
