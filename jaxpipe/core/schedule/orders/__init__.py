"""Orders of a step's actions: looped, V-shaped, bidirectional, forwards only, and from a file.

`ORDERS` has the builders by name: each takes `pp` and `microbatches`, and options of its own.
"""

from collections.abc import Callable

from jaxpipe.core.schedule.action import Schedule
from jaxpipe.core.schedule.orders.bidirectional import dualpipe, dualpipev
from jaxpipe.core.schedule.orders.loop import (
    bfs,
    gpipe,
    interleaved_1f1b,
    interleaved_zb,
    one_f_one_b,
    zb_h1,
    zb_h2,
)
from jaxpipe.core.schedule.orders.vshape import one_f_one_b_v, zbv_order

ORDERS: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "bfs": bfs,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "interleaved_zb": interleaved_zb,
    "zbv": zbv_order,
    "1f1b_v": one_f_one_b_v,
    "dualpipe": dualpipe,
    "dualpipev": dualpipev,
}
