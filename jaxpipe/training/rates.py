"""The names of what is logged of a step, and what of it is not computed in the step: its rates."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxpipe.config import Config
from jaxpipe.data.batches import Contents
from jaxpipe.pipeline import Side, total_count
from jaxpipe.runtime.devices import memory_peak, peak_flops
from jaxpipe.training import optimizer as optimizers

Report = Callable[[Side], Mapping[str, jax.Array]]

# What a line of the log may hold that no layer makes; the loop adds the step, seconds of the host
# and the held-out loss, the progress line the smoothed loss.
NAMES = (
    "step", "loss", "aux_loss", "z_loss", "loss_max", "target_tokens", "grad_norm", "lr",
    "skipped_steps", "loss_scale", "tokens_seen", "padded_tokens", "packing_efficiency",
    "tokens_per_second", "tokens_per_second_per_device", "tflops_per_device", "mfu",
    "step_seconds", "data_seconds", "save_seconds", "eval_seconds", "peak_memory_bytes",
    "eval_loss", "smoothed_loss", "bubble", "bubble_predicted",
)  # fmt: skip


@dataclass(frozen=True)
class Rates:
    """The rates of a run's steps on its mesh."""

    config: Config
    mesh: Mesh

    def __call__(
        self, step: int, tokens_seen: int, seconds: float, skipped: int = 0,
        contents: Contents | None = None,
    ) -> dict[str, float]:  # fmt: skip
        """Of a step that took so long, after which so many tokens of the data are seen.

        The learning rate is that of its update, of which so many have been `skipped`. Tokens and
        FLOPs are those of the step's `contents` if it may have padding: that counts for nothing,
        and attention as long as the documents are, not the rows.
        `mfu` is there where the peak of the device is known, `peak_memory_bytes` where the device
        counts; jax cannot reset that count, so it is of the process so far.
        """
        tokens = self.config.tokens_per_step if contents is None else contents.tokens
        per_second = tokens / seconds
        of_device = per_second / self.mesh.size
        flops = of_device * self.config.model.flops_per_token(self.config.train.seq_len)
        if contents is not None:
            documents = Counter(contents.documents.tolist())
            flops = of_device / tokens * self.config.model.flops_of_documents(documents)
        values = {
            "lr": self._learning_rate_of(max(step - 1 - skipped, 0)),
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
        """Computed on the host's own processor: a GPU would first end the step that it has begun.

        Unless jax was told to leave that alone (`JAX_PLATFORMS`).
        """
        try:
            host = jax.local_devices(backend="cpu")[0]
        except RuntimeError:
            host = None
        with jax.default_device(host):
            return float(self._learning_rate(update))

    @cached_property
    def _learning_rate(self) -> optax.Schedule:
        return optimizers.learning_rate(self.config.optimizer, self.config.train.steps)


def step_metrics(
    loss: jax.Array, norm: jax.Array, side: Side, report: Report | None = None
) -> dict[str, jax.Array]:
    """What is logged of a step and computed in it, by name; of layers what the model reports.

    Raises `ValueError` where a layer's sum or maximum has a name that is taken.
    """
    metrics = {"loss": loss, "grad_norm": norm}
    beside = {**side.sums, **side.maxima} if report is None else report(side)
    for name, value in beside.items():
        if name in NAMES:
            raise ValueError(
                f"a layer makes a sum or maximum {name!r}, but a line of the log already has that "
                f"name: rename it; {', '.join(NAMES)} are taken."
            )
        metrics[name] = value
    return metrics


def losses_of(
    names: Sequence[str],
    losses: jax.Array,
    counts: jax.Array,
    aux_losses: jax.Array | None,
    slices: int = 1,
) -> dict[str, jax.Array]:
    """What is logged of a step's losses; those of the head have these names.

    `losses`, `counts` and `aux_losses` are as in `StepOutput`, where the `slices` of a sequence
    follow one another. The head's losses are means over the step's targets, NaN where it has none;
    `loss_max` is the largest mean of a microbatch in the first. `aux_loss` is what layers add.
    `target_tokens` are the targets of each microbatch, `[M]`, to be summed on the host.
    """
    by_name = dict(zip(names, losses.T if losses.ndim > 1 else losses[None]))
    total = total_count(counts, losses.dtype)
    logged = {name: jnp.where(total > 0, shares.sum(), jnp.nan) for name, shares in by_name.items()}
    counts = counts.reshape(-1, slices).sum(1)
    sums = by_name[names[0]].reshape(-1, slices).sum(1) * total
    most = jnp.max(sums / jnp.maximum(counts, 1), where=counts > 0, initial=-jnp.inf)
    logged["loss_max"] = jnp.where(total > 0, most, jnp.nan)
    if aux_losses is not None:
        logged["aux_loss"] = aux_losses.sum()
    return logged | {"target_tokens": counts}
