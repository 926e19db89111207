"""Look-ups of n-grams, token by token in NumPy and Python's integers."""

import numpy as np

FACTORS = (16, 0x7FEB352D), (15, 0x846CA68B)


def hashed(ngram, factors, rows):
    """Return the row of an n-gram, latest token first; None: there is none so early."""
    mixed = 0
    for token, factor in zip(ngram, factors):
        mixed ^= (0 if token is None else int(token) + 1) * int(factor) % 2**32
    for shift, factor in FACTORS:
        mixed = (mixed ^ (mixed >> shift)) * factor % 2**32
    return (mixed ^ (mixed >> 16)) % rows


def added(params, factors, x_LD, document_of, tokens, eps):
    """Return what a layer adds to x at every token of a row.

    Args:
      params: of `NGramMemory`.
      factors: by which each table's hash multiplies tokens.
      x_LD: its input.
      document_of: the number of each token's document.
      tokens: the row's tokens.
      eps: of norms.
    """
    tables, rows = params["tables"], params["tables"].shape[1]
    norm = lambda x, name: x / np.sqrt((x * x).mean() + eps) * params[name]["scale"]  # noqa: E731
    made = np.zeros_like(x_LD)
    for place in range(len(tokens)):
        back = [place - j for j in range(factors.shape[1])]
        ngram = [
            tokens[i] if i >= 0 and document_of[i] == document_of[place] else None for i in back
        ]
        orders = [2] * (len(tables) // 2) + [3] * (len(tables) // 2)  # tokens that a table reads
        found = [
            table[hashed(ngram[:order], of_table, rows)]
            for table, of_table, order in zip(tables, factors, orders)
        ]
        key, value = (np.concatenate(found) @ params[name] for name in ("to_key", "to_value"))
        score = norm(x_LD[place], "query_norm") @ norm(key, "key_norm") / len(key) ** 0.5
        made[place] = value / (1 + np.exp(-score))
    return made
