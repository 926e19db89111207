"""The messages of a tick: what a rank sends, stores and keeps, by two permutes."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.parallel.mesh import PP
from jaxpipe.pipeline import buffers
from jaxpipe.schedule import Row, Tables


@dataclass(frozen=True)
class Transfers:
    """The lanes of some tables; with `poison`, idle lanes carry NaN, and so do ends of the line."""

    tables: Tables
    poison: bool

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
        if self.tables.lockstep.transfer_ticks == 1:
            arriving, row = lax.optimization_barrier((self._send(loads), row))
        for packed, lanes in zip(arriving, self._ways.values()):
            for message, lane in zip(packed if len(lanes) > 1 else [packed], lanes):
                inbox = buffers.write(inbox, message, row.arrive[lane])
        columns = self.tables.columns
        if self.tables.stores(columns.keep_y):
            inbox = buffers.write(inbox, y, row.keep_y)
        if self.tables.stores(columns.keep_dx):
            inbox = buffers.write(inbox, dx, row.keep_dx)
        if self.tables.lockstep.transfer_ticks == 2:
            loads, inbox = lax.optimization_barrier((loads, inbox))
            sent = self._send(loads)
        return sent, inbox, row

    def _loads(self, made: dict[str, Any], row: Row) -> list[jax.Array]:
        """A message for each lane; nothing in particular where nobody waits for one.

        Messages in flight during the conds must not be the arrays that these write, or XLA copies
        them every tick; so what two-tick transfers send is made of them by a select.
        """
        loads = []
        for index, lane in enumerate(self.tables.lanes):
            load, *other = (made[kind] for kind in lane.kinds)
            if other or self.tables.lockstep.transfer_ticks == 2:
                nothing = jnp.full_like(load, jnp.nan if self.poison else 0)
                load = lax.select_n(row.send[index], nothing, load, *other)
            loads.append(load)
        return loads

    def _send(self, loads: list[jax.Array]) -> tuple[jax.Array, ...]:
        """What comes from the neighbours: one permute each way, lanes stacked.

        XLA gives zeros to a rank to which there is no route.
        """
        packed = []
        for hop, lanes in self._ways.items():
            routes = self.tables.routes[hop]
            brought = lax.ppermute(_pack([loads[lane] for lane in lanes]), PP, routes)
            if self.poison:
                reached = jnp.isin(lax.axis_index(PP), jnp.array([to for _, to in routes]))
                brought = jnp.where(reached, brought, jnp.nan)
            packed.append(brought)
        return tuple(packed)

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
