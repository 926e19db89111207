"""What one candidate costs: time, bubbles, bytes and messages."""

from dataclasses import dataclass

from jaxpipe.analysis import hidden_bytes
from jaxpipe.config import Config
from jaxpipe.planning.candidates import Candidate
from jaxpipe.planning.hardware import ITEMSIZE, OpSeconds
from jaxpipe.planning.memory import RankBytes, rank_bytes
from jaxpipe.schedule import Report, simulate


@dataclass(frozen=True)
class Estimate:
    """One row of a plan. Tokens are those of the whole step, over all replicas.

    The time is that of the pipeline: the gradients' sum over dp and the update come on top.
    """

    candidate: Candidate
    report: Report  # seconds
    bytes: RankBytes  # of a device
    sent: int  # bytes that a device sends to its neighbours in a step
    tokens: int  # of a step

    @property
    def held(self) -> int:
        """Most (microbatch, stage) pairs on any rank; a run-ahead fills what it may."""
        ahead = self.candidate.in_flight
        most = max(self.report.peak_until_w)
        return min(ahead, self.candidate.schedule.microbatches) if ahead else most

    @property
    def tokens_per_second(self) -> float:
        """By the lockstep, which is what the scan takes."""
        return self.tokens / self.report.lockstep_makespan


def estimate(
    config: Config, candidate: Candidate, seconds: OpSeconds, *, transfer_ticks: int
) -> Estimate:
    """Simulate a candidate of a configuration."""
    train, schedule = config.train, candidate.schedule
    report = simulate(
        schedule,
        seconds.costs(candidate.layers),
        transfer_ticks=transfer_ticks,
        in_flight=candidate.in_flight,
    )
    sizes = {"batch": train.microbatch_size, "seq_len": train.seq_len, "tp": config.parallel.tp}
    message = hidden_bytes(config.model, itemsize=ITEMSIZE[train.compute_dtype], **sizes)
    samples = train.grad_accum_steps * train.microbatch_size * config.parallel.dp
    return Estimate(
        candidate,
        report,
        rank_bytes(config, candidate),
        _messages(candidate) * message,
        samples * train.seq_len,
    )


def _messages(candidate: Candidate) -> int:
    """Activations and gradients that the busiest rank sends in a step."""
    schedule = candidate.schedule
    sent = [0] * schedule.pp
    for m in range(schedule.microbatches):
        for stage in range(schedule.stages - 1):
            here, there = (schedule.placement.rank(s, m) for s in (stage, stage + 1))
            if here != there:
                sent[here] += 1  # y
                sent[there] += 1  # dx
    return max(sent)
