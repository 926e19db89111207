"""The knobs of the lockstep: how the scan that runs a schedule places its actions into ticks."""

from dataclasses import dataclass

from jaxpipe.schedule.action import Action, Cell, Op, Placement, ScheduleError, link_of


@dataclass(frozen=True)
class Lockstep:
    """How a schedule is laid out in ticks; none of it changes what is computed.

    Attributes:
      transfer_ticks: a message sent in tick t can be used from tick t + transfer_ticks on, 1 or 2.
      in_flight: None keeps each rank's order of cells. A number lets every rank run forwards ahead
        of its order while it holds at most so many microbatches; with one-tick transfers it then
        also pairs an F with a gradient action in one cell, so that all ranks do the same work in a
        tick. For 1F1B, 2P - 1 wins back what the lockstep costs, and more gains nothing.
      every, offset: F of the first stage stand only in ticks that are multiples of `every`, and
        gradients at the input of the last stage `offset` ticks after such. So cells of neighbours
        can be kept in ticks in which one does not wait for the other; an idle tick takes no time
        by itself. `scan.paced` chooses them.
      turns: ranks r and r + 1 exchange only in ticks that are r modulo `turns`, by a permute of
        theirs in a branch, so in other ticks neither waits for the other. Cells stand only where
        what they make can travel next. For transfers of one tick.
      meets: all ranks meet in every tick, whoever sends to whom, as they do in permutes on CPU.
      vocab_parallel: all ranks compute both ends of the model, each a part of the vocabulary. The
        loss is then made at the start of the tick after the last stage's F; so its gradient cannot
        share the cell of that F, and packed 1F1B needs 2P in flight.
      defer_ends: the gradients of the embedding's and the head's own matrices wait for W of their
        stages, for the memory of what they take: a whole gradient of the logits for each microbatch
        that waits.
      pairs: the two halves of a cell, an F and a gradient of different chunks, stand in one branch
        of the program, so that XLA may run collectives of one during the compute of the other; else
        they are two branches in a row, and DualPipe compiles in two thirds of the time.

    Raises `ScheduleError` for a `transfer_ticks` other than 1 or 2, an `in_flight`, `every` or
    `turns` below 1, an `offset` that is not below `every`, `turns` with transfers of two ticks, and
    for ends that are both shared and deferred.

    >>> Lockstep(transfer_ticks=2).in_flight is None
    True
    """

    transfer_ticks: int = 1
    in_flight: int | None = None
    vocab_parallel: bool = False
    defer_ends: bool = False
    pairs: bool = True
    every: int = 1
    offset: int = 0
    turns: int = 1
    meets: bool = False

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
        if self.turns < 1 or (self.turns > 1 and self.transfer_ticks > 1):
            raise ScheduleError(
                f"turns={self.turns}, transfer_ticks={self.transfer_ticks}: the first must be at "
                f"least 1, and more only with transfers of one tick."
            )
        if self.vocab_parallel and self.defer_ends:
            raise ScheduleError(
                "vocab_parallel with defer_ends: ends that all ranks share leave nothing to even "
                "out by waiting; use one of them."
            )

    def lets(self, action: Action, placement: Placement, tick: int) -> bool:
        """Whether an action may stand in a tick."""
        op, stage, _ = action
        if self.turns > 1:
            link = link_of(action, placement)
            if link is not None and (tick + 1 - link) % self.turns:
                return False
        if op is Op.F and stage == 0:
            return tick % self.every == 0
        if op.gives_dx and stage == placement.stages - 1:
            return (tick - self.offset) % self.every == 0
        return True

    def next_for(self, cell: Cell, placement: Placement, tick: int) -> int:
        """The first tick from this one on in which all of a cell may stand.

        Raises `ScheduleError` where there is none.
        """
        forward, gradient, _ = cell
        needs_loss = forward and gradient and gradient[1:] == forward[1:]
        if self.vocab_parallel and needs_loss and forward.stage == placement.stages - 1:
            raise ScheduleError(f"{cell}: with shared ends the loss comes a tick after its F.")
        if self.every == self.turns == 1:
            return tick
        for later in range(tick, tick + self.every * self.turns):
            if all(self.lets(action, placement, later) for action in cell.actions):
                return later
        raise ScheduleError(f"{cell}: no tick is open to all of it, {self.every=}, {self.turns=}.")


PLAIN = Lockstep()  # transfers end in their tick, and every rank keeps its order
