"""The properties of tables that determine which program the executor traces, and cases of each."""

from functools import cache

from orders import ROUNDS, min_microbatches, near

from jaxpipe.core.schedule import ORDERS, Lockstep, lower

FLAGS = ("embed", "head", "head_weight", "embed_gradient", "dy_of_head", "first_slice",
         "last_slice")  # fmt: skip


def signature(tables):
    """Return a key that is equal for tables that lead to the same program, up to numbers and sizes.

    It holds the ops with their chunks, pairs, buffers that have slots, permute directions, values
    that stay on their rank, flags that are ever set, whether embedding and head are on one rank or
    on two, and the ticks of a transfer.
    """
    columns = tables.columns
    return (
        tuple(tables.forwards),
        tuple(tables.gradients),
        tables.pairs,
        tuple(size > 0 for size in tables.slots),
        tables.lanes,
        tables.lanes and tables.lockstep.transfer_ticks,
        tables.uses_inbox(columns.keep_y),
        tables.uses_inbox(columns.keep_dx),
        tuple(name for name in FLAGS if getattr(columns, name).any()),
        len(tables.first_ranks),
        tables.first_ranks == tables.last_ranks,
    )


@cache
def schedule_of(name, pp, more=True):
    """Return a schedule with its fewest microbatches, or with the next number above pp."""
    above = 2 * pp if name in ROUNDS else max(pp + 3, min_microbatches(name, pp) + 2)
    return near(name, pp, above if more else min_microbatches(name, pp), virtual_stages=2)


# (name, pp, more, transfer_ticks): some of all names on all meshes have the signatures of all.
CASES = [(name, 4, True, ticks) for name in ORDERS for ticks in (1, 2)] + [
    *(
        (name, 2, False, ticks)
        for name in ("zbv", "1f1b_v", "dualpipe", "dualpipev")
        for ticks in (1, 2)
    ),
    *((name, 1, False, 1) for name in ("gpipe", "interleaved_1f1b", "zb_h1", "interleaved_zb")),
    ("dualpipev", 1, False, 1),  # two microbatches fill and drain it
    ("dualpipev", 1, True, 1),
]


def signature_of(name, pp, more, transfer_ticks):
    """Return the signature of a case."""
    return signature(lower(schedule_of(name, pp, more), Lockstep(transfer_ticks)))
