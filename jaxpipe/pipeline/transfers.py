"""The messages of a tick: what a rank sends, stores and keeps, by two permutes, or by one."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.parallel.mesh import PP
from jaxpipe.pipeline import buffers
from jaxpipe.pipeline.messages import MessagePrinter
from jaxpipe.schedule import Row, Tables
from jaxpipe.schedule.lanes import Route


@dataclass(frozen=True)
class Transfers:
    """The lanes of some tables; with `poison`, idle lanes carry NaN, and so do ends of the line.

    A `printer` prints what is sent and received.
    """

    tables: Tables
    poison: bool
    printer: MessagePrinter | None = None

    def arriving(self, message: jax.Array) -> Any:
        """What is on its way before the first tick: None where transfers end in their tick."""
        if self.tables.lockstep.transfer_ticks == 1:
            return None
        return tuple(_pack([message] * len(lanes)) for lanes in self._ways.values())

    def receive(
        self, y: jax.Array, dx: Any, arriving: Any, inbox: jax.Array, row: Row
    ) -> tuple[Any, jax.Array, Row]:
        """Store what arrived and what was kept; send what was made last tick.

        One-tick transfers are complete before any cond starts: the barrier ties them to the row,
        from which every predicate comes. Without it XLA may put one permute between two conds, and
        neighbours then wait for each other in the middle of the tick. Two-tick transfers have the
        whole tick to arrive and are stored at the start of the next: the barrier lets them start
        once the inbox is written, and so be in flight while the conds run.
        """
        loads, sent = self._loads({"y": y, "dx": dx}, row), None
        if self.printer is not None:
            self.printer.sent(self.tables, row, loads)
        if self.tables.lockstep.transfer_ticks == 1:
            arriving, row = lax.optimization_barrier((self._send(loads, row), row))
        for packed, lanes in zip(arriving, self._ways.values()):
            for message, lane in zip(packed if len(lanes) > 1 else [packed], lanes):
                if self.printer is not None:
                    self.printer.received(self.tables, row, lane, message)
                inbox = buffers.write(inbox, message, row.arrive[lane])
        columns = self.tables.columns
        if self.tables.stores(columns.keep_y):
            inbox = buffers.write(inbox, y, row.keep_y)
        if self.tables.stores(columns.keep_dx):
            inbox = buffers.write(inbox, dx, row.keep_dx)
        if self.tables.lockstep.transfer_ticks == 2:
            loads, inbox = lax.optimization_barrier((loads, inbox))
            sent = self._send(loads, row)
        return sent, inbox, row

    def _loads(self, made: dict[str, Any], row: Row) -> list[jax.Array]:
        """A message for each lane; nothing in particular where nobody waits for one.

        Messages in flight during the conds must not be the arrays that these write, or XLA copies
        them every tick; so what two-tick transfers send is made of them by a select. By turns it
        says which of two is sent.
        """
        lockstep = self.tables.lockstep
        selects = lockstep.transfer_ticks == 2 or lockstep.turns > 1
        loads = []
        for index, lane in enumerate(self.tables.lanes):
            load, *other = (made[kind] for kind in lane.kinds)
            if other or selects:
                nothing = jnp.full_like(load, jnp.nan if self.poison else 0)
                load = lax.select_n(row.send[index], nothing, load, *other)
            loads.append(load)
        return loads

    def _send(self, loads: list[jax.Array], row: Row) -> tuple[jax.Array, ...]:
        """What comes from the neighbours: one permute each way, lanes stacked.

        By turns a rank has one neighbour to exchange with, which gets what there is for it; so a
        permute brings both ways what is sent. All ranks are in the branch of the tick's turn.
        """
        packed = [_pack([loads[lane] for lane in lanes]) for lanes in self._ways.values()]
        first, *others = self.tables.routes
        if not others:
            return tuple(map(self._permuted, packed, (first[hop] for hop in self._ways)))
        up, down = packed
        ways = [(*routes[+1], *routes[-1]) for routes in self.tables.routes]
        exchanges = [partial(self._permuted, routes=of_turn) for of_turn in ways]
        brought = lax.switch(row.turn, exchanges, jnp.where(row.send[0] > 0, up, down))
        return brought, brought

    def _permuted(self, message: jax.Array, routes: tuple[Route, ...]) -> jax.Array:
        """What the routes bring; XLA gives zeros to a rank to which there is none."""
        brought = lax.ppermute(message, PP, routes)
        if self.poison:
            reached = jnp.array([to for _, to in routes], jnp.int32)
            brought = jnp.where(jnp.isin(lax.axis_index(PP), reached), brought, jnp.nan)
        return brought

    @property
    def _ways(self) -> dict[int, list[int]]:
        """The lanes of each hop."""
        ways: dict[int, list[int]] = {}
        for index, lane in enumerate(self.tables.lanes):
            ways.setdefault(lane.hop, []).append(index)
        return ways


def _pack(messages: list[jax.Array]) -> jax.Array:
    """Messages for one permute: stacked, unless there is only one."""
    return messages[0] if len(messages) == 1 else jnp.stack(messages)
