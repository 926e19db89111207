"""Find what of a conversation a chat template does not write.

Every text of the conversation gets a mark of its own, a character that no text has. If the template
writes the marked conversation as it writes the other one, marks aside, then a text is written where
its mark is. What this does not settle is changed alone: if the output stays the same, it is lost.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from jaxpipe.data.prepare.records import ChatMessage, harmless_keys

# Characters of Unicode's planes for private use, which need no escape in JSON.
_MARKS = range(0xF0000, 0xFFFFD)
_ANY_MARK = re.compile(f"([{chr(_MARKS[0])}-{chr(_MARKS[-1])}])")

Values = list[dict[str, Any]]  # messages
Renderer = Callable[[Values, list[Any]], str]  # of messages and tools; may raise `ValueError`


class _Place(NamedTuple):
    """A text of a conversation."""

    of: int  # 0: messages, 1: tools
    number: int  # of the message or tool
    path: tuple[str | int, ...]  # keys within it


def check_written(
    messages: list[ChatMessage], tools: list[Any], text: str, render: Renderer
) -> None:
    """Raise `ValueError` where a template writes nothing of a content, a call, a tool or a key.

    What is left out only because later messages follow (the reasoning of earlier turns) is the
    template's design.

    Args:
      messages: the conversation.
      tools: its tools.
      text: the conversation as the template writes it.
      render: writes a conversation.
    """
    whole = [message.values for message in messages], tools
    places = [*_find_places(whole)]
    marks = dict(zip(places, map(chr, _MARKS)))
    marked = whole
    for place, mark in marks.items():
        marked = _edit(marked, place, partial(_mark, mark=mark))
    try:
        result = render(*marked)
    except ValueError:
        result = ""
    parts = _ANY_MARK.split(result)
    seen = {*parts[1::2]} if "".join(parts[::2]) == text else set()
    for place in places:
        if marks.get(place) in seen or _is_written(whole, place, text, render):
            continue
        name = ".".join(map(str, place.path))
        if place.of:
            raise ValueError(
                f"its tool {place.number + 1}: the chat template does not write {name}"
            )
        role = messages[place.number].values["role"]
        raise ValueError(
            f"its message {place.number + 1}: the chat template does not write its {name} in the "
            f"role {role!r}, which would be lost"
        )


def _find_places(whole: tuple[Values, list[Any]]) -> Iterator[_Place]:
    for number, values in enumerate(whole[0]):
        harmless = harmless_keys(values["role"])
        for key, value in values.items():
            if key == "role" or key in harmless or not value:
                continue
            if key != "tool_calls" or not isinstance(value, list):
                yield _Place(0, number, (key,))
                continue
            for at, call in enumerate(value):
                for path in _function_paths(call, "arguments", "name"):
                    yield _Place(0, number, (key, at, *path))
    for number, tool in enumerate(whole[1]):
        for path in _function_paths(tool, "name"):
            yield _Place(1, number, path)


def _function_paths(value: Any, *keys: str) -> Iterator[tuple[str, ...]]:
    """Yield the path of the first of those keys of a tool or a call that is not empty."""
    function = value
    path: tuple[str, ...] = ()
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        function, path = value["function"], ("function",)
    for key in keys:
        if isinstance(function, dict) and function.get(key):
            yield (*path, key)
            return


def _is_written(
    whole: tuple[Values, list[Any]], place: _Place, text: str, render: Renderer
) -> bool:
    """Whether changes of a text alone change the output, also if the conversation ends there."""
    if _changes_output(whole, place, text, render):
        return True
    messages, tools = whole
    if place.of or place.number == len(messages) - 1:
        return False
    ended = messages[: place.number + 1], tools
    try:
        return _changes_output(ended, place, render(*ended), render)
    except ValueError:
        return False


def _changes_output(
    whole: tuple[Values, list[Any]], place: _Place, text: str, render: Renderer
) -> bool:
    value: Any = whole[place.of][place.number]
    for key in place.path:
        value = value[key]
    for changed in _marked(value, chr(_MARKS[0])):
        try:
            if render(*_edit(whole, place, lambda _: changed)) != text:  # noqa: B023 (called now)
                return True
        except ValueError:
            return True  # the template reads it
    return False


def _edit(
    whole: tuple[Values, list[Any]], place: _Place, edit: Callable[[Any], Any]
) -> tuple[Values, list[Any]]:
    """Return a copy of messages and tools with another text at a place."""
    parts = [*whole]
    parts[place.of] = _edit_at(parts[place.of], (place.number, *place.path), edit)
    return parts[0], parts[1]


def _edit_at(value: Any, path: tuple[str | int, ...], edit: Callable[[Any], Any]) -> Any:
    if not path:
        return edit(value)
    copy = value.copy()
    copy[path[0]] = _edit_at(value[path[0]], path[1:], edit)
    return copy


def _mark(value: Any, mark: str) -> Any:
    return next(_marked(value, mark))


def _marked(value: Any, mark: str) -> Iterator[Any]:
    """Yield a value with a mark in it, in several ways."""
    if isinstance(value, str):
        # Before the last character, which neither blanks at the end nor the end of a tag hide.
        at = len(value) // 2 if value.endswith(">") else len(value.rstrip()) - 1
        for begin in (max(at, 0), len(value), 0):
            yield value[:begin] + mark + value[begin:]
    elif isinstance(value, dict):
        (first, held), *rest = value.items()
        yield {f"{first}{mark}": held, **dict(rest)}
        yield {}
    else:
        yield value
        yield None
