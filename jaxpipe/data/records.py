"""Convert records of JSON or Parquet to passages of text that count in the loss or do not.

    {"text": "..."}                                          all text counts
    {"prompt": "...", "completion": "..."}                   the completion counts
    {"messages": [{"role": "...", "content": "..."}, ...]}   the assistant's messages count

Messages may also be called `conversations`, their keys `from` and `value`; `prompt` and
`completion` may be lists of messages. Messages are written in ChatML,
`<|im_start|>ROLE\\nCONTENT<|im_end|>\\n`; in a message that counts, the text counts from CONTENT
on. A key of a message, or of a record with messages or a prompt, is used, harmless or refused. A
key that could change the training data is dropped only if the user asks for it.
"""

from dataclasses import dataclass
from typing import Any

from jaxpipe.config import ConfigError

Passages = list[tuple[str, bool]]  # a document's text in passages; whether each counts in the loss
MESSAGES = ("messages", "conversations")
MARKS = ("<|im_start|>", "<|im_end|>")
# Keys with metadata of a record, which do not affect the training data.
HARMLESS = frozenset({
    "id", "idx", "index", "uuid", "hash", "prompt_id", "message_id", "conversation_id",
    "session_id", "tool_call_id", "name", "source", "dataset", "subset", "split", "category",
    "categories", "topic", "title", "tags", "language", "lang", "url", "license", "model",
    "timestamp", "created", "created_at", "date", "metadata", "meta", "score", "rating",
    "num_turns", "num_tokens", "token_count", "finish_reason",
})  # fmt: skip
_ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool", "function")}
_ROLES |= {"human": "user", "gpt": "assistant"}
_SWITCHES = ("weight", "train", "loss")  # keys of a message: 1 or true if it counts, 0 or false


@dataclass
class RecordConverter:
    """Converts records to passages.

    Attributes:
      field: the key of the text or messages, may be nested (`a.b`); empty: the usual keys.
      ignored: keys that are dropped although they may change the training data.
      chat_fault: why the tokenizer cannot encode messages; empty: it can.
      chats: number of records with messages so far.
    """

    field: str = ""
    ignored: frozenset[str] = frozenset()
    chat_fault: str = ""
    chats: int = 0

    def passages(self, record: Any) -> Passages:
        """Return the passages of a record; none where its fields are null.

        Raises:
          ValueError: where a required field is missing, or another field would be lost.
          ConfigError: for messages, where the tokenizer has no tokens for ChatML.

        >>> RecordConverter().passages({"prompt": "1 + 1 = ", "completion": "2"})
        [('1 + 1 = ', False), ('2', True)]
        """
        if isinstance(record, str):
            return [(record, True)]
        if not isinstance(record, dict):
            raise ValueError("it is no JSON object")
        name = self.field or next((name for name in MESSAGES if record.get(name) is not None), "")
        if not name and record.get("text") is None and "prompt" in record:
            return self._answer(record)
        name = name or next((one for one in ("text", *MESSAGES) if one in record), "text")
        value = _read_value(record, name)
        if isinstance(value, list) or name in MESSAGES:
            self._check_lost(record, (name.split(".")[0], name), "its messages")
            self.chats += 1
            return [] if value is None else self._chat(value)
        return [] if value is None else [(_check_string(value, name), True)]

    def _answer(self, record: dict[str, Any]) -> Passages:
        """Return the passages of a prompt and a completion: both text, or both messages."""
        names = ("prompt", "completion")
        prompt, completion = (_read_value(record, name) for name in names)
        self._check_lost(record, names, "its prompt")
        if prompt is completion is None:
            return []
        if isinstance(prompt, list) and isinstance(completion, list):
            self.chats += 1
            return self._chat(prompt, counts=False) + self._chat(completion)
        return [
            (_check_string(prompt, "prompt"), False),
            (_check_string(completion, "completion"), True),
        ]

    def _chat(self, messages: Any, counts: bool = True) -> Passages:
        """Write messages in ChatML.

        With `counts` the assistant's messages count; a message's own switch decides otherwise.
        """
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise ValueError("its messages are no list of objects")
        if self.chat_fault:
            raise ConfigError(self.chat_fault)
        passages = []
        for number, message in enumerate(messages, 1):
            try:
                role, content, switch = self._message(message)
            except ValueError as error:
                raise ValueError(f"its message {number}: {error}") from error
            counted = counts and role == "assistant" if switch is None else switch
            passages.append((f"<|im_start|>{role}\n", False))
            passages.append((f"{content}<|im_end|>\n", counted))
        return passages

    def _message(self, message: dict[str, Any]) -> tuple[str, str, bool | None]:
        """Return role, content, and the message's own switch for the loss, if it has one."""
        names = ["from" if "from" in message and "role" not in message else "role"]
        names += ["value" if "value" in message and "content" not in message else "content"]
        role, content = (_read_value(message, name) for name in names)
        self._check_lost(message, (*names, *_SWITCHES), "it")
        if not isinstance(role, str) or role not in _ROLES:
            raise ValueError(f"its role {role!r} is none of {', '.join(_ROLES)}")
        switches = {name: message[name] for name in _SWITCHES if message.get(name) is not None}
        if any(value not in (0, 1) for value in switches.values()) or len({*switches.values()}) > 1:
            raise ValueError(f"{switches} is neither 0 nor 1, false nor true")
        switch = bool(next(iter(switches.values()))) if switches else None
        return _ROLES[role], _join_content(content, names[1]), switch

    def _check_lost(self, found: dict[str, Any], used: tuple[str, ...], of: str) -> None:
        """Raise `ValueError` for non-empty keys that are neither used nor harmless."""
        known = HARMLESS.union(used, self.ignored)
        lost = [key for key, value in found.items() if key not in known and not _is_empty(value)]
        if lost:
            names = ", ".join(map(repr, lost))
            where = f"it has {names}" if of == "it" else f"it has {names} beside {of}"
            raise ValueError(f"{where}, which would be lost")


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)


def _read_value(record: dict[str, Any], name: str) -> Any:
    """Return a record's value at a key, or at a path of keys with dots; None for null."""
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        if value is None:
            return None  # the enclosing struct is null
        if not isinstance(value, dict) or part not in value:
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
        held = {k: v for k, v in part.items() if v is not None} if isinstance(part, dict) else {}
        if held.keys() != {"type", "text"} or held["type"] != "text":
            raise ValueError(f"a part of its {name} is not like {{'type': 'text', 'text': '...'}}")
        texts.append(_check_string(held["text"], "text"))
    return "".join(texts)
