"""Run tables with symbols for values; fail if a slot holds a value other than the expected one."""

import numpy as np

from jaxpipe.core.schedule import Action, Op


class Rank:
    """One rank's buffers and its latest outputs."""

    def __init__(self, schedule, tables, rank):
        self.schedule, self.tables, self.rank = schedule, tables, rank
        self.inbox, self.for_b, self.for_w, self.stash = {}, {}, {}, {}
        self.for_head, self.for_embed = {}, {}
        self.states, self.dstates = {}, {}  # slot -> (stage, sequence, number of slices done)
        self.ends = []  # (end, microbatch) whose parameter gradients are done
        self.y = self.dx = None

    def stage(self, chunk, m):
        placement = self.schedule.placement
        (stage,) = (
            s
            for s in range(placement.stages)
            if placement.rank(s, m) == self.rank and placement.chunk(s, m) == chunk
        )
        return stage

    def share_vocabulary(self, columns):
        """Run embedding and head that all ranks share, at the start of a tick."""
        for rank, which in zip(self.tables.last_ranks, columns.head):
            if which and self.rank == rank:
                m = which - 1
                assert self.y == ("y", self.schedule.stages - 1, m)
                self.inbox[columns.dy_write] = ("dx", self.schedule.stages, m)
                self.ends.append(("head", m))
        for rank, which, returned in zip(
            self.tables.first_ranks, columns.embed, columns.embed_gradient
        ):
            if returned and self.rank == rank:
                m = returned - 1
                assert self.dx == ("dx", 0, m)
                self.ends.append(("embed", m))
            if which and self.rank == rank:
                self.inbox[columns.embed_write] = ("y", -1, which - 1)

    def keep(self, row, arrived):
        for index, message in enumerate(arrived):
            self.inbox[row.arrive[index]] = message
        self.inbox[row.keep_y] = self.y
        self.inbox[row.keep_dx] = self.dx
        self.inbox.pop(self.tables.slots.inbox, None)
        self.y = self.dx = None

    def forward(self, row, chunk):
        m = row.forward_mb
        stage = self.stage(chunk, m)
        shared = row.vocab_parallel is not None
        assert row.embed == (stage == 0 and not shared)
        if stage or shared:
            assert self.inbox[row.x_read] == ("y", stage - 1, m)
        self.y = ("y", stage, m)
        if self.tables.has_gradients:
            self.for_b[row.for_b_write] = self.for_w[row.for_w_write] = (stage, m)
        sequence, slice_ = divmod(m, self.schedule.slices)
        if self.schedule.slices > 1:
            assert row.first_slice == (slice_ == 0)
            assert slice_ == 0 or self.states[row.state] == (stage, sequence, slice_)
            self.states[row.state] = (stage, sequence, slice_ + 1)
        return Action(Op.F, stage, m)

    def head(self, row):
        assert self.y == ("y", self.schedule.stages - 1, row.forward_mb)
        self.y = ("dx", self.schedule.stages, row.forward_mb)
        if self.tables.slots.head:
            self.for_head[row.head_write] = row.forward_mb
        else:
            self.ends.append(("head", row.forward_mb))

    def gradient(self, row, op, chunk):
        m = row.gradient_mb
        stage = self.stage(chunk, m)
        assert self.for_w[row.for_w_read] == (stage, m)
        if row.head_weight:
            assert (stage, self.for_head[row.head_read]) == (self.schedule.stages - 1, m)
            self.ends.append(("head", m))
        if op is Op.W:
            assert self.stash[row.stash_read] == (stage, m)
            return Action(op, stage, m)
        dy = self.y if row.dy_of_head else self.inbox[row.dy_read]
        assert dy == ("dx", stage + 1, m)
        assert self.for_b[row.for_b_read] == (stage, m)
        slices = self.schedule.slices
        sequence, slice_ = divmod(m, slices)
        if slices > 1:
            assert self.states[row.state_read] == (stage, sequence, slices)
            assert row.last_slice == (slice_ == slices - 1)
            assert row.last_slice or self.dstates[row.dstate] == (stage, sequence, slice_ + 1)
            self.dstates[row.dstate] = (stage, sequence, slice_)
        if op is Op.B:
            self.stash[row.stash_write] = (stage, m)
        self.dx = ("dx", stage, m)
        return Action(op, stage, m)

    def work(self, row):
        """Run the actions of one tick, in the executor's order."""
        tables = self.tables
        forward = row.chunk_column(Op.F) - 1
        gradients = [
            (op, row.chunk_column(op) - 1) for op in (Op.B, Op.BW, Op.W) if row.chunk_column(op)
        ]
        if row.pair:
            assert forward < 0
            assert not gradients
            forward, *gradient = tables.pairs[row.pair - 1]
            gradients = [tuple(gradient)]
            assert not row.dy_of_head
        assert len(gradients) <= 1
        if forward >= 0:
            yield self.forward(row, forward)
        if row.head:
            self.head(row)
        for op, chunk in gradients:
            yield self.gradient(row, op, chunk)
        self.for_embed[row.dx_write] = self.dx
        self.for_embed.pop(tables.slots.embed, None)
        if row.embed_gradient:
            dx = self.for_embed[row.dx_read] if tables.slots.embed else self.dx
            assert dx == ("dx", 0, row.gradient_mb)
            self.ends.append(("embed", row.gradient_mb))

    def sends(self, row, index):
        kinds, sent = self.tables.lanes[index].kinds, row.send[index]
        return getattr(self, kinds[sent - 1]) if sent else None


def at(columns, tick, rank):
    """Return one row of columns, which may be nested tuples."""
    if isinstance(columns, np.ndarray):
        return int(columns[tick, rank])
    values = [None if column is None else at(column, tick, rank) for column in columns]
    return type(columns)(*values) if hasattr(columns, "_fields") else tuple(values)


def brought_by(tables, phase, sent, rank, lane):
    """Return the message that a direction delivers to a rank, or None without a permute pair."""
    hop = tables.lanes[lane].hop
    sender = (rank - hop) % len(sent)
    return sent[sender][lane] if (sender, rank) in tables.permute_pairs[phase][hop] else None


def interpret(schedule, tables):
    """Run the tables with checks; return all actions."""
    rows = [
        [at(tables.columns, tick, rank) for rank in range(schedule.pp)]
        for tick in range(tables.ticks)
    ]
    ranks = [Rank(schedule, tables, r) for r in range(schedule.pp)]
    nothing = [[None] * len(tables.lanes)] * schedule.pp
    done, arriving = [], nothing
    for now in rows:
        if tables.lockstep.vocab_parallel:
            assert len({row.vocab_parallel[:3] for row in now}) == 1  # all ranks do the same
            for rank, row in zip(ranks, now):
                rank.share_vocabulary(row.vocab_parallel)
        sent = [
            [rank.sends(row, i) for i in range(len(tables.lanes))] for rank, row in zip(ranks, now)
        ]
        brought = [
            [brought_by(tables, now[r].phase, sent, r, i) for i in range(len(tables.lanes))]
            for r in range(schedule.pp)
        ]
        arrived, arriving = (
            (brought, nothing) if tables.lockstep.transfer_ticks == 1 else (arriving, brought)
        )
        for rank, row, messages in zip(ranks, now, arrived):
            rank.keep(row, messages)
            done += rank.work(row)
    assert len(done) == len(set(done))
    ends = sorted(end for rank in ranks for end in rank.ends)
    every = [(end, m) for end in ("embed", "head") for m in range(schedule.microbatches)]
    assert ends == every or not tables.has_gradients
    return set(done)
