"""What one candidate costs: time, bubbles, bytes and messages."""

from dataclasses import dataclass

from jaxpipe.analysis import hidden_bytes
from jaxpipe.config import Config
from jaxpipe.planning.candidates import Candidate
from jaxpipe.planning.hardware import ITEMSIZE, OpSeconds
from jaxpipe.planning.memory import RankBytes, rank_bytes
from jaxpipe.schedule import Report, lower, simulate


@dataclass(frozen=True)
class Estimate:
    """One row of a plan. Tokens are those of the whole step, over all replicas.

    The time is that of the pipeline: the gradients' sum over dp and the update come on top.
    """

    candidate: Candidate
    report: Report  # seconds
    bytes: RankBytes  # of a device
    sent: int  # bytes that a device sends to its neighbours in a step: every lane, every tick
    tokens: int  # of a step
    held: int  # most (microbatch, stage) pairs on any rank

    @property
    def tokens_per_second(self) -> float:
        """By the lockstep, which is what the scan takes."""
        return self.tokens / self.report.lockstep_makespan


def estimate(
    config: Config, candidate: Candidate, seconds: OpSeconds, *, transfer_ticks: int
) -> Estimate:
    """Simulate a candidate of a configuration."""
    train, schedule = config.train, candidate.schedule
    knobs = {
        "transfer_ticks": transfer_ticks,
        "in_flight": candidate.in_flight,
        "vocab_parallel": config.parallel.vocab_parallel_pp,
    }
    costs = seconds.costs(candidate.layers, shared_by=config.parallel.ends_shared_by)
    report = simulate(schedule, costs, **knobs)
    tables = lower(schedule, defer_ends=config.parallel.defer_ends, **knobs)
    sizes = {"batch": train.microbatch_size, "seq_len": train.seq_len, "tp": config.parallel.tp}
    message = hidden_bytes(
        config.model, itemsize=ITEMSIZE[train.compute_dtype],
        sequence_parallel=config.parallel.sequence_parallel, **sizes,
    )  # fmt: skip
    samples = train.grad_accum_steps * train.microbatch_size * config.parallel.dp
    return Estimate(
        candidate,
        report,
        rank_bytes(config, candidate, tables),
        tables.ticks * len(tables.lanes) * message,
        samples * train.seq_len,
        tables.slots.for_w,
    )
