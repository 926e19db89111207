"""The loss on the held-out samples."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from jaxpipe.config import ConfigError
from jaxpipe.data.batches import Batch, DataSplit
from jaxpipe.runtime import position
from jaxpipe.runtime.group import Group
from jaxpipe.training.state import State
from jaxpipe.training.step_metrics import host_total
from jaxpipe.training.trainer import Trainer


def heldout_loss(
    trainer: Trainer,
    group: Group,
    eval_step: Callable[[State, Any], tuple[Any, Any]],
    heldout: DataSplit,
    state: State,
    say: Callable[[str], None],
) -> float:
    """Mean loss over the targets of at most `train.eval_steps` batches [nats]; NaN: no targets.

    It does not depend on how rows are divided into batches and microbatches. Raises `ConfigError`
    in all processes where one of them cannot read its rows.
    """
    total = targets = 0.0
    batches = heldout.batches(0, **trainer.sharder.sizes)
    with contextlib.closing(batches):
        first = itertools.islice(batches, trainer.config.train.eval_steps)
        for batch in _alike(first, group):
            position.enter("evaluate")
            loss, counts = eval_step(state, trainer.put(batch))
            count = host_total(counts)
            total, targets = total + float(loss) * count, targets + count
    if not targets:
        say("no held-out row has a target: there is no held-out loss")
        return math.nan
    return total / targets


def _alike(batches: Iterator[Batch], group: Group) -> Iterator[Batch]:
    """The batches; raises `ConfigError` in all processes where one of them cannot read its own."""
    while True:
        batch, cause = None, None
        try:
            batch = next(batches, None)
        except (ConfigError, OSError) as error:
            cause = error
        group.refuse("held-out batch", str(cause or ""), cause)
        if batch is None:
            return
        yield batch
