"""Pairs of answers to a prompt: their records, their rows, and their order.

A prepared folder of pairs has two documents for each: the prompt with the chosen answer, and the
prompt with the rejected one, of which the answers count in the loss.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

import numpy as np

from jaxpipe.config import ConfigError
from jaxpipe.data.samples import Sample, make_sample
from jaxpipe.data.shards.documents import ShardedDocuments
from jaxpipe.data.shards.tokens import values_beside

ANSWERS = ("chosen", "rejected")
OF_PAIR = len(ANSWERS)  # documents


def answers_of(record: Any) -> list[dict[str, Any]]:
    """Return a record's two answers as records with `prompt` and `completion`.

    Without a prompt of messages, the answers are conversations, whose common beginning is the
    prompt; a `prompt` that is text must be in it.

    Raises `ValueError` where the record is no pair.

    >>> answers_of({"prompt": "2 + 2 = ", "chosen": "4", "rejected": "5"})[1]
    {'prompt': '2 + 2 = ', 'completion': '5'}
    """
    if not isinstance(record, dict):
        raise ValueError("it is no JSON object")
    if missing := [name for name in ANSWERS if record.get(name) is None]:
        others = ", ".join(map(repr, record)) or "none"
        raise ValueError(f"it has no {missing[0]!r}, but {others}: a pair has both answers")
    prompt, answers = record.get("prompt"), [record[name] for name in ANSWERS]
    if all(isinstance(answer, list) for answer in answers) and not isinstance(prompt, list):
        same = takewhile(lambda pair: pair[0] == pair[1], zip(*answers))
        shared = [message for message, _ in same]
        contents = [one.get("content", one.get("value")) for one in shared if isinstance(one, dict)]
        if not shared:
            raise ValueError("its conversations begin with different messages: they have no prompt")
        if prompt is not None and prompt not in contents:
            raise ValueError("its prompt is no message that both of its conversations begin with")
        prompt, answers = shared, [answer[len(shared) :] for answer in answers]
    if prompt is None:
        raise ValueError("it has no 'prompt', and its answers are no conversations")
    extra = {name: value for name, value in record.items() if name not in ("prompt", *ANSWERS)}
    return [extra | {"prompt": prompt, "completion": answer} for answer in answers]


@dataclass(frozen=True)
class PairSamples:
    """Rows of one answer each: 2 i is the chosen answer of a pair, 2 i + 1 the rejected one.

    Pairs with an answer longer than `seq_len` + 1 tokens are left out.

    Attributes:
      documents: the answers.
      seq_len: most tokens of a row.
      rows: names of the float32 values beside the tokens that a row also has.
    """

    documents: ShardedDocuments
    seq_len: int
    rows: tuple[str, ...]

    def __post_init__(self) -> None:
        if not len(self._pairs):
            raise ConfigError(
                f"no pair in {self.documents.place} has answers of 2 to train.seq_len + 1 = "
                f"{self.seq_len + 1} tokens: raise train.seq_len."
            )

    def __len__(self) -> int:
        return OF_PAIR * len(self._pairs)

    def __getitem__(self, index: int) -> Sample:
        number = self._number(index)
        documents = self.documents
        sample = make_sample(documents.tokens(number), documents.counted(number))
        sample["real"] = np.ones_like(sample["inputs"])
        return sample | {name: self._values(name, number)[1:] for name in self.rows}

    def documents_of(self, index: int) -> list[int]:
        """Return the input tokens of the row's answer."""
        return [int(self._lengths[self._number(index)]) - 1]

    @property
    def left_out(self) -> int:
        """Number of pairs that are too long."""
        return len(self._lengths) // OF_PAIR - len(self._pairs)

    def _values(self, name: str, number: int) -> np.ndarray:
        """Return the values beside a document's tokens, float32 `[tokens]`."""
        parts = self.documents.in_shards(number)
        values = [values_beside(shard, name).read(begin, end) for shard, begin, end in parts]
        return np.concatenate(values)

    def _number(self, index: int) -> int:
        """Return the document of a row."""
        return OF_PAIR * int(self._pairs[index // OF_PAIR]) + index % OF_PAIR

    @cached_property
    def _lengths(self) -> np.ndarray:
        return self.documents.lengths

    @cached_property
    def _pairs(self) -> np.ndarray:
        """The numbers of the pairs that fit, integers `[pairs]`."""
        lengths = self._lengths.reshape(-1, OF_PAIR)
        return np.flatnonzero((lengths.max(1) <= self.seq_len + 1) & (lengths.min(1) > 1))


@dataclass(frozen=True)
class PairOrder:
    """The order of rows, from an order of pairs; both rows of a pair stay together."""

    pairs: Sequence[int]

    def __len__(self) -> int:
        return min(OF_PAIR * len(self.pairs), sys.maxsize)

    def __getitem__(self, index: int) -> int:
        return OF_PAIR * self.pairs[index // OF_PAIR] + index % OF_PAIR
