"""Print the messages between pipeline ranks tick by tick, to debug a schedule (`[debug]`)."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.core.mesh import PP, REPLICA_AXES, TP
from jaxpipe.core.schedule import TableRow, Tables


@dataclass(frozen=True)
class MessagePrinter:
    """Prints a line for every message that a pipeline rank sends, and for every one it receives.

    Attributes:
      ticks: the first and the last tick printed; empty: all.
      pp_ranks: the pipeline ranks printed; empty: all.
    """

    ticks: tuple[int, ...] = ()
    pp_ranks: tuple[int, ...] = ()

    def sent(self, tables: Tables, row: TableRow, loads: list[jax.Array]) -> None:
        """Print the norms of the messages sent in this tick, except those that no rank reads."""
        for index, (lane, load) in enumerate(zip(tables.lanes, loads)):
            for place, kind in enumerate(lane.kinds, start=1):
                text = f"sends {kind} to pp_rank {{other}}"
                self._print(text, row, row.send[index] == place, lane.hop, load)

    def received(self, tables: Tables, row: TableRow, index: int, message: jax.Array) -> None:
        """Print the norm and slot of the message received on a lane, unless it is dropped."""
        lane, slot = tables.lanes[index], row.arrive[index]
        text = f"receives {' or '.join(lane.kinds)} from pp_rank {{other}} into slot {{slot}}"
        real = slot < tables.slots.inbox
        self._print(text, row, real, -lane.hop, message, slot=slot)

    def _print(
        self,
        text: str,
        row: TableRow,
        real: jax.Array,
        hop: int,
        message: jax.Array,
        **more: Any,
    ) -> None:
        """Print a line if the message is `real`; `more` are further values for the text."""
        rank = lax.axis_index(PP)
        if self.ticks:
            assert row.tick is not None  # a step with a printer numbers its ticks
            first, last = self.ticks
            real &= (first <= row.tick) & (row.tick <= last)
        if self.pp_ranks:
            real &= jnp.isin(rank, jnp.array(self.pp_ranks))

        def shown() -> None:
            jax.debug.print(
                f"tick {{tick}} pp_rank {{rank}} replica {{replica}} tp {{tp}} {text}: "
                f"norm {{norm:.6e}}",
                tick=row.tick, rank=rank, replica=lax.axis_index(REPLICA_AXES),
                tp=lax.axis_index(TP),
                other=(rank + hop) % lax.axis_size(PP),
                norm=jnp.linalg.norm(message.astype(jnp.float32)), **more,
            )  # fmt: skip

        lax.cond(real, shown, lambda: None)
