"""What of the tables decides which program the executor traces."""

FLAGS = ("embed", "head", "head_weight", "embed_gradient", "dy_of_head", "first_slice",
         "last_slice")  # fmt: skip


def signature(tables):
    """Equal for tables that lead to the same program, but for numbers and sizes.

    Ops with their chunks, pairs, buffers that have slots, lanes, what stays on its rank, flags
    that are ever set, whether both ends are on one rank or on two, and how long a transfer takes.
    """
    columns = tables.columns
    return (
        tuple(tables.forwards),
        tuple(tables.gradients),
        tables.pairs,
        tuple(size > 0 for size in tables.slots),
        tables.lanes,
        tables.lanes and tables.lockstep.transfer_ticks,
        tables.stores(columns.keep_y),
        tables.stores(columns.keep_dx),
        tuple(name for name in FLAGS if getattr(columns, name).any()),
        len(tables.first_ranks),
        tables.first_ranks == tables.last_ranks,
    )
