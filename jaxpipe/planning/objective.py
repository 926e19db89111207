"""The loss that a configuration names. Importing this imports jax."""

from collections.abc import Callable
from typing import Any

from jaxpipe.config import Config, ConfigError, first_line, load_function
from jaxpipe.model.objective import LOSS, Objective
from jaxpipe.model.preference import DpoLoss


def objective_of(config: Config) -> Objective | None:
    """The loss of the targets' log-probabilities; None: the cross-entropy of the head.

    Raises `ConfigError` where there is no such function, or it is no loss function
    (`jaxpipe.model.objective`).
    """
    train, preference = config.train, config.preference
    if train.loss == "cross_entropy":
        return None
    function: Callable[..., Any]
    if config.reads_pairs:
        function = DpoLoss(preference.beta, preference.label_smoothing)
    else:
        function = load_function("train.loss", train.loss, "logprobs, rows")
    shape = (train.microbatch_size, train.seq_len)
    try:
        objective = Objective.trace(function, config.loss_rows, shape, train.loss_temperature)
    except Exception as error:  # a function of the user may raise anything
        raise ConfigError(
            f"train.loss={train.loss!r} is no loss of (logprobs, rows) with train.loss_rows="
            f"{list(train.loss_rows)}: {first_line(error)}; see jaxpipe/model/objective.py."
        ) from error
    if LOSS in objective.metrics:
        raise ConfigError(f"train.loss={train.loss!r} has a metric {LOSS!r}: rename it.")
    return objective
