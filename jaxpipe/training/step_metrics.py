"""Metrics of a step: their names, the losses, and the rates that are computed on the host."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxpipe import optimizer as optimizers
from jaxpipe.config import Config
from jaxpipe.core.contract import Aux
from jaxpipe.core.executor import divisor, total_count
from jaxpipe.data.batches import DocumentLengths
from jaxpipe.runtime.devices import memory_peak, peak_flops

Report = Callable[[Aux], Mapping[str, jax.Array]]

# Names of logged metrics that do not come from a layer. The loop adds the step, the host times and
# the held-out loss; the progress line adds the smoothed loss.
NAMES = (
    "step", "loss", "aux_loss", "z_loss", "loss_max", "target_tokens", "grad_norm", "lr",
    "skipped_steps", "not_finite_in_row", "spikes_in_row", "loss_scale", "tokens_seen",
    "padded_tokens", "packing_efficiency", "tokens_per_second", "tokens_per_second_per_device",
    "tflops_per_device", "mfu", "step_seconds", "data_seconds", "save_seconds", "eval_seconds",
    "evaluate_seconds",
    "data_idle_seconds", "host_idle_seconds", "lost_seconds", "rank_lost_seconds",
    "peak_memory_bytes", "eval_loss", "smoothed_loss", "bubble", "bubble_predicted",
)  # fmt: skip


@dataclass(frozen=True)
class Rates:
    """Computes a step's throughput, learning rate and memory on the host."""

    config: Config
    mesh: Mesh

    def __call__(
        self, step: int, tokens_seen: int, seconds: float, skipped: int = 0,
        contents: DocumentLengths | None = None,
    ) -> dict[str, float]:  # fmt: skip
        """The rates of one step by name.

        `mfu` is omitted if the device's peak is not known, and `peak_memory_bytes` if the device
        has no such count. jax cannot reset that count, so it covers the process so far.

        Args:
          step: number of the step.
          tokens_seen: training tokens up to and including the step.
          seconds: time of the step [s].
          skipped: earlier steps without an update, which the learning rate does not count.
          contents: documents and padding of the step's rows; None: rows have no padding. Padding
            does not count as tokens, and attention FLOPs follow the documents, not the rows.
        """
        tokens = self.config.tokens_per_step if contents is None else contents.tokens
        per_second = tokens / seconds
        of_device = per_second / self.mesh.size
        flops = of_device * self.config.model.flops_per_token(self.config.train.seq_len)
        if contents is not None:
            documents = Counter(contents.documents.tolist())
            flops = of_device / tokens * self.config.model.flops_of_documents(documents)
        flops -= of_device * self.config.model.frozen_flops(self.config.lora.rank)
        values = {
            "lr": self._learning_rate_of(step - 1 - skipped),
            "tokens_seen": tokens_seen,
            "tokens_per_second": per_second,
            "tokens_per_second_per_device": of_device,
            "tflops_per_device": flops / 1e12,
            "step_seconds": seconds,
        }
        if contents is not None:
            computed = contents.rows * self.config.length_of(contents.longest)
            values["padded_tokens"] = computed - tokens
            values["packing_efficiency"] = tokens / computed
        device: jax.Device = self.mesh.devices.flat[0]
        if (peak := peak_flops(device.device_kind)) is not None:
            values["mfu"] = flops / peak
        if (memory := memory_peak()) is not None:
            values["peak_memory_bytes"] = memory
        return values

    def _learning_rate_of(self, update: int) -> float:
        """Compute on the CPU backend, because a GPU would first finish its running step.

        If `JAX_PLATFORMS` excludes the CPU, the default device is used.
        """
        try:
            host = jax.local_devices(backend="cpu")[0]
        except RuntimeError:
            host = None
        with jax.default_device(host):
            return float(self._learning_rate(update))

    @cached_property
    def _learning_rate(self) -> optax.Schedule:
        return jax.jit(optimizers.learning_rate(self.config.optimizer, self.config.train.steps))


def step_metrics(
    loss: jax.Array, norm: jax.Array, aux: Aux, report: Report | None = None
) -> dict[str, jax.Array]:
    """Metrics computed within a step: loss, gradient norm, and layers' auxiliary outputs.

    `report` maps the auxiliary outputs to metrics by name; None: log their sums and maxima. Raises
    `ValueError` where one of these names is in `NAMES`.
    """
    metrics = {"loss": loss, "grad_norm": norm}
    beside = {**aux.sums, **aux.maxima} if report is None else report(aux)
    for name, value in beside.items():
        _check_name(name, "a layer makes a sum or maximum")
        metrics[name] = value
    return metrics


def _check_name(name: str, made: str) -> None:
    if name in NAMES:
        raise ValueError(
            f"{made} {name!r}, but a line of the log already has that name: rename it; "
            f"{', '.join(NAMES)} are taken."
        )


def losses_of(
    names: Sequence[str],
    losses: jax.Array,
    counts: jax.Array,
    aux_losses: jax.Array | None,
    slices: int = 1,
) -> dict[str, jax.Array]:
    """The metrics of a step's losses by name.

    Args:
      names: names of the head's losses.
      losses, counts, aux_losses: as in `StepOutput`; the slices of a sequence are adjacent.
      slices: sequence slices per microbatch.

    Returns:
      The head's losses, means over the step's targets, NaN if there are none; `loss_max`, the
      largest microbatch mean of the first loss; `aux_loss`, the sum of layers' losses; and
      `target_tokens`, the targets of each microbatch, `[M]`, which the host sums (`host_total`).

    Raises:
      ValueError: a loss besides the first has one of `NAMES`, but for `z_loss`, which is a loss.
    """
    for name in names[1:]:
        if name != "z_loss":
            _check_name(name, "the loss returns a metric")
    by_name = dict(zip(names, losses.T if losses.ndim > 1 else losses[None]))
    total = total_count(counts, losses.dtype)
    logged = {name: jnp.where(total > 0, shares.sum(), jnp.nan) for name, shares in by_name.items()}
    counts = counts.reshape(-1, slices).sum(1)
    sums = by_name[names[0]].reshape(-1, slices).sum(1) * total
    most = jnp.max(sums / divisor(counts), where=counts > 0, initial=-jnp.inf)
    logged["loss_max"] = jnp.where(total > 0, most, jnp.nan)
    if aux_losses is not None:
        logged["aux_loss"] = aux_losses.sum()
    return logged | {"target_tokens": counts}


def host_total(counts: jax.Array | np.ndarray) -> int | float:
    """The sum of counts, exact, or of a loss's weights, in float64.

    >>> host_total(jnp.full(4, 2**30)), host_total(jnp.array([0.25, 0.5]))
    (4294967296, 0.75)
    """
    counts = np.asarray(counts)
    return counts.sum(dtype=np.result_type(counts, np.int64)).item()
