"""Messages between pipeline ranks in a tick: permutes, and what is stored in the inbox.

A lane is one message per rank and tick to the rank `hop` further; a permute stacks the lanes of
its direction.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.core.executor import buffers
from jaxpipe.core.executor.messages import MessagePrinter
from jaxpipe.core.mesh.mesh import PP
from jaxpipe.core.schedule import TableRow, Tables
from jaxpipe.core.schedule.lanes import PermutePair


@dataclass(frozen=True)
class Transfers:
    """Sends and receives the messages of a tick.

    Attributes:
      tables: the lowered schedule; its `lanes` and `routes` (permute pairs) are used.
      poison: idle lanes carry NaN, and a rank to which no permute pair leads receives NaN.
      printer: prints the messages; None: no printing.
    """

    tables: Tables
    poison: bool
    printer: MessagePrinter | None = None

    def arriving(self, message: jax.Array) -> Any:
        """Return the messages in flight before the first tick; None with one-tick transfers."""
        if self.tables.lockstep.transfer_ticks == 1:
            return None
        return tuple(_pack([message] * len(lanes)) for lanes in self._ways.values())

    def receive(
        self, y: jax.Array, dx: Any, arriving: Any, inbox: jax.Array, row: TableRow
    ) -> tuple[Any, jax.Array, TableRow]:
        """Send the outputs of the last tick, and store received and kept values in the inbox.

        One-tick transfers complete before any cond starts: the barrier ties them to the row, from
        which every predicate comes. Without it XLA may put a permute between two conds, and
        neighbours then wait for each other in the middle of the tick. Two-tick transfers have the
        whole tick to arrive and are stored at the start of the next: the barrier starts them once
        the inbox is written, so that they are in flight while the conds run.

        Args:
          y, dx: outputs of the last tick; dx is None in a forward-only pass.
          arriving: with two-tick transfers, the messages received in the last tick.
          inbox: ring buffer of messages.
          row: the row of the tables.

        Returns:
          The new `arriving`, the inbox, and the row behind the barrier.
        """
        loads, sent = self._loads({"y": y, "dx": dx}, row), None
        if self.printer is not None:
            self.printer.sent(self.tables, row, loads)
        if self.tables.lockstep.transfer_ticks == 1:
            arriving = self._send(loads, row)
            if arriving:  # XLA for GPUs fails on a barrier of the row alone, which is constant
                arriving, row = lax.optimization_barrier((arriving, row))
        for packed, lanes in zip(arriving, self._ways.values()):
            for message, lane in zip(packed if len(lanes) > 1 else [packed], lanes):
                if self.printer is not None:
                    self.printer.received(self.tables, row, lane, message)
                inbox = buffers.write(inbox, message, row.arrive[lane])
        columns = self.tables.columns
        if self.tables.uses_inbox(columns.keep_y):
            inbox = buffers.write(inbox, y, row.keep_y)
        if self.tables.uses_inbox(columns.keep_dx):
            inbox = buffers.write(inbox, dx, row.keep_dx)
        if self.tables.lockstep.transfer_ticks == 2:
            loads, inbox = lax.optimization_barrier((loads, inbox))
            sent = self._send(loads, row)
        return sent, inbox, row

    def _loads(self, outputs: dict[str, Any], row: TableRow) -> list[jax.Array]:
        """Return the message of every lane; its content is arbitrary where no rank reads it.

        Messages in flight during the conds must not be the arrays that the conds write, or XLA
        copies these every tick; two-tick transfers therefore send the result of a select. With
        phased permutes or two kinds per lane, the select also chooses what is sent.
        """
        lockstep = self.tables.lockstep
        selects = lockstep.transfer_ticks == 2 or lockstep.phases > 1
        loads = []
        for index, lane in enumerate(self.tables.lanes):
            load, *other = (outputs[kind] for kind in lane.kinds)
            if other or selects:
                nothing = jnp.full_like(load, jnp.nan if self.poison else 0)
                load = lax.select_n(row.send[index], nothing, load, *other)
            loads.append(load)
        return loads

    def _send(self, loads: list[jax.Array], row: TableRow) -> tuple[jax.Array, ...]:
        """Run one permute per direction, with lanes stacked, and return the received messages.

        With phased permutes a rank exchanges with one neighbour only, so a single permute carries
        both directions. All ranks take the branch of the tick's phase.
        """
        packed = [_pack([loads[lane] for lane in lanes]) for lanes in self._ways.values()]
        first, *others = self.tables.permute_pairs
        if not others:
            return tuple(map(self._permuted, packed, (first[hop] for hop in self._ways)))
        up, down = packed
        ways = [(*routes[+1], *routes[-1]) for routes in self.tables.permute_pairs]
        exchanges = [partial(self._permuted, routes=of_turn) for of_turn in ways]
        brought = lax.switch(row.phase, exchanges, jnp.where(row.send[0] > 0, up, down))
        return brought, brought

    def _permuted(self, message: jax.Array, routes: tuple[PermutePair, ...]) -> jax.Array:
        """Permute a message over permute pairs; a rank to which none leads gets zeros (or NaN)."""
        brought = lax.ppermute(message, PP, routes)
        if self.poison:
            reached = jnp.array([to for _, to in routes], jnp.int32)
            brought = jnp.where(jnp.isin(lax.axis_index(PP), reached), brought, jnp.nan)
        return brought

    @property
    def _ways(self) -> dict[int, list[int]]:
        """The indices of the lanes of each permute direction (`hop`)."""
        ways: dict[int, list[int]] = {}
        for index, lane in enumerate(self.tables.lanes):
            ways.setdefault(lane.hop, []).append(index)
        return ways


def _pack(messages: list[jax.Array]) -> jax.Array:
    """Stack the messages of one permute, unless there is only one."""
    return messages[0] if len(messages) == 1 else jnp.stack(messages)
