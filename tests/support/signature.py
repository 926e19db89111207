"""The properties of tables that determine which program the executor traces."""

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
