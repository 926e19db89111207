"""Options of lockstep execution: how a schedule is placed into the ticks of the scan."""

from dataclasses import dataclass

from jaxpipe.core.schedule.action import Action, Cell, Op, Placement, ScheduleError
from jaxpipe.core.schedule.values import permute_pair


@dataclass(frozen=True)
class Lockstep:
    """How a schedule is placed into ticks; no option changes the numbers that it computes.

    Attributes:
      transfer_ticks: ticks until a message can be read, 1 or 2: one sent in tick t can be read from
        tick t + transfer_ticks on.
      in_flight: limit on live microbatches per rank, within which forwards run ahead of the rank's
        order; None keeps the order. With one-tick transfers an F is then also paired with a
        gradient action in one cell, so that all ranks do the same work in a tick. For 1F1B, 2P - 1
        removes the idle time that lockstep adds, and a higher limit gains nothing.
      every, offset: F of the first stage run only in ticks that are multiples of `every`, and B or
        BW of the last stage only `offset` ticks after such a tick. This can move cells of
        neighbours into ticks in which neither waits for the other; an idle tick takes no time by
        itself. `scan.optimize_pace` chooses them.
      phases: phased permutes: ranks r and r + 1 exchange only in ticks equal to r modulo `phases`,
        by a permute of that phase in a branch, so in other ticks neither waits for the other. A
        cell runs only where its result can be sent in the next tick. Needs one-tick transfers.
      synchronizes_all: all ranks synchronize in every tick, whichever ranks exchange, as permutes
        on CPU do.
      vocab_parallel: embedding and head are vocabulary-parallel over pp. The loss is computed at
        the start of the tick after the last stage's F, so the gradient action of a microbatch
        cannot share the cell of that F, and packed 1F1B needs 2P in flight.
      defer_embed_head: the weight gradients of embedding and head are deferred to W of their
        stages. This keeps their inputs live: the full gradient of the logits for every deferred
        microbatch.
      pairs: F and gradient action of a cell, if of different chunks, are traced into one branch, so
        that XLA may overlap collectives of one with compute of the other. False: two consecutive
        branches; DualPipe then compiles in two thirds of the time.

    Raises `ScheduleError` for a `transfer_ticks` other than 1 or 2, an `in_flight`, `every` or
    `phases` below 1, an `offset` that is not below `every`, `phases` above 1 with transfers of two
    ticks, and for `vocab_parallel` together with `defer_embed_head`.

    >>> Lockstep(transfer_ticks=2).in_flight is None
    True
    """

    transfer_ticks: int = 1
    in_flight: int | None = None
    vocab_parallel: bool = False
    defer_embed_head: bool = False
    pairs: bool = True
    every: int = 1
    offset: int = 0
    phases: int = 1
    synchronizes_all: bool = False

    def __post_init__(self) -> None:
        if self.transfer_ticks not in (1, 2):
            raise ScheduleError(
                f"transfer_ticks={self.transfer_ticks}: a transfer takes 1 or 2 ticks."
            )
        if self.in_flight is not None and self.in_flight < 1:
            raise ScheduleError(
                f"in_flight={self.in_flight}: a rank must hold at least 1 microbatch."
            )
        if not 0 <= self.offset < self.every:
            raise ScheduleError(
                f"every={self.every}, offset={self.offset}: the first must be at least 1, and the "
                f"second at least 0 and less than it."
            )
        if self.phases < 1 or (self.phases > 1 and self.transfer_ticks > 1):
            raise ScheduleError(
                f"phases={self.phases}, transfer_ticks={self.transfer_ticks}: the first must be at "
                f"least 1, and more only with transfers of one tick."
            )
        if self.vocab_parallel and self.defer_embed_head:
            raise ScheduleError(
                "vocab_parallel with defer_embed_head: an embedding and head that all ranks share "
                "leave nothing to even out by waiting; use one of them."
            )

    def allows(self, action: Action, placement: Placement, tick: int) -> bool:
        """Return whether `every`, `offset` and `phases` allow an action in a tick."""
        op, stage, _ = action
        if self.phases > 1:
            link = permute_pair(action, placement)
            if link is not None and (tick + 1 - link) % self.phases:
                return False
        if op is Op.F and stage == 0:
            return tick % self.every == 0
        if op.computes_dx and stage == placement.stages - 1:
            return (tick - self.offset) % self.every == 0
        return True

    def next_allowed_tick(self, cell: Cell, placement: Placement, tick: int) -> int:
        """Return the first tick, from `tick` on, that is allowed to all actions of a cell.

        Raises `ScheduleError` where there is none.
        """
        forward, gradient = cell.forward, cell.gradient
        same = forward and gradient and gradient[1:] == forward[1:] and forward
        if self.vocab_parallel and same and same.stage == placement.stages - 1:
            raise ScheduleError(
                f"{cell}: the loss of a vocabulary shared over pp comes a tick after its F."
            )
        if self.every == self.phases == 1:
            return tick
        for later in range(tick, tick + self.every * self.phases):
            if all(self.allows(action, placement, later) for action in cell.actions):
                return later
        raise ScheduleError(f"{cell}: no tick is open to all of it, {self.every=}, {self.phases=}.")


PLAIN = Lockstep()  # one-tick transfers, and every rank keeps its order
