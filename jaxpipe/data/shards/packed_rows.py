"""Where the documents of packed rows begin, from the columns that other programs write for it.

seq_lengths    the lengths of a row's documents (TRL)
position_ids   the position of a token in its document, from 0 (axolotl, TRL's collator)
seq_idx, document_ids, segment_ids   the number of a token's document, which never falls
"""

import numpy as np

LENGTHS = "seq_lengths"
BORDERS = ("position_ids", "seq_idx", "document_ids", "segment_ids")  # have one value per token


def find_document_ends(
    columns: dict[str, tuple[np.ndarray, np.ndarray]], ids: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Return the cumulative tokens at the end of each document, integers `[documents]`.

    Args:
      columns: values and row lengths of the columns above; none: every row is a document.
      ids: of all rows, `[tokens]`.
      lengths: tokens of every row.

    Raises `ValueError` with the row where a column has no such form, or two differ.
    """
    rows = np.cumsum(lengths)
    first = np.zeros(len(ids) + 1, bool)  # whether a document begins at a token
    first[np.append(0, rows)] = True
    found, by = first, ""
    for name, (values, widths) in columns.items():
        if name == LENGTHS:
            of_row = np.repeat(np.arange(len(rows)), widths)
            short = np.bincount(of_row, values < 1, len(rows)) > 0
            wrong_row = short | (np.bincount(of_row, values, len(rows)) != lengths)
            if wrong_row.any():
                raise ValueError(
                    f"row {int(wrong_row.argmax()) + 1}: {name} must be lengths of 1 or more, "
                    f"whose sum is the number of the row's ids"
                )
            starts = first.copy()
            starts[np.cumsum(values)] = True
        elif name == "position_ids":
            starts = first | np.append(values == 0, False)
            at = np.arange(len(starts))
            wrong = values != (at - np.maximum.accumulate(np.where(starts, at, 0)))[:-1]
            _check(name, wrong, rows, "must count from 0 within every document")
        else:
            change = np.diff(values.astype(np.int64), prepend=0)
            starts = first | np.append(change != 0, False)
            _check(name, (change < 0) & ~first[:-1], rows, "must not fall within a row")
        if by:
            _check(name, starts[:-1] != found[:-1], rows, f"names other documents than {by}")
        found, by = starts, name
    return np.flatnonzero(found)[1:]


def _check(name: str, wrong: np.ndarray, rows: np.ndarray, rule: str) -> None:
    """Raise `ValueError` with the first row that has a wrong token."""
    if wrong.any():
        row = int(np.searchsorted(rows, int(wrong.argmax()), side="right")) + 1
        raise ValueError(f"row {row}: {name} {rule}")
