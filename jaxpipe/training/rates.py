"""The names of what is logged of a step, and what of it is not computed in the step: its rates."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import optax
from jax.sharding import Mesh

from jaxpipe.config import Config
from jaxpipe.data.batches import Contents
from jaxpipe.pipeline import Side
from jaxpipe.runtime.devices import memory_peak, peak_flops
from jaxpipe.training import optimizer as optimizers

Report = Callable[[Side], Mapping[str, jax.Array]]

# What a line of the log may hold that no layer makes; the loop adds the step, seconds of the host
# and the held-out loss, the progress line the smoothed loss.
NAMES = (
    "step", "loss", "z_loss", "loss_max", "grad_norm", "lr", "skipped_steps", "loss_scale",
    "tokens_seen", "padded_tokens", "packing_efficiency", "tokens_per_second",
    "tokens_per_second_per_device", "tflops_per_device", "mfu", "step_seconds", "data_seconds",
    "save_seconds", "eval_seconds", "peak_memory_bytes",
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


def other_losses(
    names: Sequence[str], first: jax.Array, others: Sequence[jax.Array]
) -> dict[str, jax.Array]:
    """What is logged of the head's losses beside the first of these names.

    `first` and `others` are each microbatch's shares, `[M]`, in the first and in the others.
    """
    more = {name: losses.sum() for name, losses in zip(names[1:], others)}
    return more | {"loss_max": first.max() * first.size}
