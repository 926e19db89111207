"""Direct preference optimisation: a loss of pairs of answers (Rafailov et al. 2023, "DPO")."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpipe.model.loss import IGNORE
from jaxpipe.model.objective import Rows

REFERENCE = "reference"  # the row of the reference model's log-probabilities (`Config.loss_rows`)


@dataclass(frozen=True)
class DpoLoss:
    """The loss of pairs, of which a microbatch has the preferred answer before the other one.

    With the margin h = beta * ((chosen - rejected) - (their reference)), of the answers' summed
    log-probabilities, a pair's loss is -log sigmoid(h). With label smoothing e it is
    -(1 - e) log sigmoid(h) - e log sigmoid(-h) (Mitchell 2023, "conservative DPO").

    Attributes:
      beta: how strongly the model is held to the reference; larger is stronger.
      label_smoothing: share of pairs that are assumed to be labelled the wrong way round.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0

    def __call__(
        self, logprobs_BL: jax.Array, rows: Rows
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Sum of the pairs' losses, number of pairs, and sums of rewards; see `objective`.

        Rows 2 i and 2 i + 1 are a pair; one without any target does not count. A reward is beta
        times the difference of the answer's log-probabilities from the reference.
        """
        counts_BL = rows["targets"] != IGNORE
        gained_BL = jnp.where(counts_BL, logprobs_BL - rows[REFERENCE], 0)
        reward_P2 = self.beta * gained_BL.sum(axis=1).reshape(-1, 2)
        real_P = counts_BL.any(axis=1).reshape(-1, 2).any(axis=1)
        margin_P = reward_P2[:, 0] - reward_P2[:, 1]
        loss_P = (self.label_smoothing - 1) * jax.nn.log_sigmoid(margin_P)
        if self.label_smoothing:
            loss_P -= self.label_smoothing * jax.nn.log_sigmoid(-margin_P)

        def total(values_P: jax.Array) -> jax.Array:
            return jnp.where(real_P, values_P, 0).sum()

        metrics = {
            "reward_chosen": total(reward_P2[:, 0]),
            "reward_rejected": total(reward_P2[:, 1]),
            "reward_accuracy": total((margin_P > 0).astype(margin_P.dtype)),
        }
        return total(loss_P), real_P.sum(), metrics
