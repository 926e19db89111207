"""Find the tokens of a document that count in the loss, from their spans in the text.

A token counts if any of its characters is in a passage that counts. `tokenizers` can return the
span of every token, but that costs a fifth of its speed. The tokens of byte-level BPE are
consecutive bytes of the text, so there the byte length of every token is enough.
"""

import json
import unicodedata
from bisect import bisect_left, bisect_right
from typing import Any

import numpy as np

from jaxpipe.data.optional import import_optional
from jaxpipe.data.prepare.records import Passages


def byte_widths(tokenizer: Any) -> np.ndarray | None:
    """Return the text bytes of every id, integers `[ids]`; None if it is no byte-level BPE."""
    settings = json.loads(tokenizer.to_str())
    steps = settings["pre_tokenizer"] or {}
    steps = steps.get("pretokenizers", [steps])
    levels = [step for step in steps if step.get("type") == "ByteLevel"]
    normal = (settings["normalizer"] or {"type": "NFC"})["type"]
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    letters = import_optional("tokenizers.pre_tokenizers", "a tokenizer").ByteLevel.alphabet()
    if not levels or normal != "NFC" or any(step["add_prefix_space"] for step in levels):
        return None
    if settings["model"]["type"] != "BPE" or not vocab.keys() >= {*letters}:
        return None  # some bytes may have no token
    added = tokenizer.get_added_tokens_decoder()
    widths = np.zeros(max(vocab.values()) + 1, np.int64)
    for token, number in vocab.items():  # the vocabulary writes every byte as one letter
        widths[number] = len(added[number].content.encode()) if number in added else len(token)
    return widths


def loss_mask_by_bytes(
    ids: np.ndarray, widths: np.ndarray, passages: Passages
) -> np.ndarray | None:
    """Return which ids `[tokens]` count, bool `[tokens]`; None where bytes and text differ.

    The tokenizer may normalise text that is not in Unicode's NFC. Nothing else makes text longer,
    so tokens of the same total length as NFC text cover exactly this text.
    """
    ends = np.cumsum(widths[ids])
    begins = ends - widths[ids]
    counted, begin = np.zeros(len(ids), bool), 0
    for text, counts in passages:
        end = begin + len(text.encode())
        if counts and text:
            first, last = np.searchsorted(ends, begin, "right"), np.searchsorted(begins, end)
            counted[first:last] = True
        begin = end
    whole = begin == (ends[-1] if len(ends) else 0)
    normal = all(unicodedata.is_normalized("NFC", text) for text, _ in passages)
    return counted if whole and normal else None


def loss_mask_by_offsets(encoding: Any, passages: Passages) -> np.ndarray:
    """Return which tokens of a `tokenizers.Encoding` count, bool `[tokens]`.

    Tokens follow the order of the text, so bisection finds the tokens of a passage; asking for the
    spans of all tokens is slow.
    """
    place, tokens = encoding.token_to_chars, range(len(encoding))
    counted, begin = np.zeros(len(tokens), bool), 0
    for text, counts in passages:
        end = begin + len(text)
        if counts and text:
            first = bisect_right(tokens, begin, key=lambda token: place(token)[1])
            last = bisect_left(tokens, end, first, key=lambda token: place(token)[0])
            counted[first:last] = True
        begin = end
    return counted
