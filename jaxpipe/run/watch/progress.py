"""Progress output of a run: a live line on a terminal, plain lines elsewhere."""

import contextlib
import math
from collections.abc import Mapping
from datetime import timedelta

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from jaxpipe.config import LogConfig, mask_secrets
from jaxpipe.run.watch.metrics import MetricValue
from jaxpipe.runtime.command import flush_or_drop


class Progress:
    """Prints steps and messages; a context manager that restores the terminal on exit.

    On a terminal one live line shows the latest step, with messages above it. Elsewhere, or with
    `log.progress = false`, every `log.every`-th step is a line of its own. `silent` prints nothing.
    """

    def __init__(
        self,
        steps: int,
        config: LogConfig,
        console: Console | None = None,
        *,
        silent: bool = False,
    ):
        self._steps = steps
        self._every = config.every
        self._console = console or _Output(
            soft_wrap=True, quiet=silent, highlight=False, emoji=False,
            markup=False,  # "[" may be in a path
        )  # fmt: skip
        self._live = None
        if config.progress and self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=8)
        self._seconds: float | None = None  # smoothed time of a step, without compilation
        self._losses: float | None = None  # smoothed sum of a step's losses over its targets
        self._targets: float | None = None  # smoothed number of a step's targets

    def __enter__(self) -> "Progress":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            if self._live:
                self._live.stop()
        flush_or_drop(self._console.file)

    def say(self, message: RenderableType) -> None:
        """Print a message above the live line; ignore errors of the output, such as a full disk."""
        with contextlib.suppress(OSError):
            self._console.print(mask_secrets(message))

    def update(self, step: int, values: dict[str, MetricValue], *, first: bool) -> None:
        """Show one step's scalar metrics.

        `first`: the step's time includes compilation, so it does not count for the ETA.
        """
        numbers = _numbers(values)
        if not first:
            self._seconds = _smoothed(self._seconds, numbers["step_seconds"])
        loss, targets = numbers["loss"], numbers["target_tokens"]
        if math.isfinite(loss):
            self._losses = _smoothed(self._losses, loss * targets)
            self._targets = _smoothed(self._targets, targets)
        if self._losses is not None and self._targets is not None:
            numbers["smoothed_loss"] = self._losses / self._targets
        line = describe(step, self._steps, numbers, self._seconds)
        if self._live:
            self._live.update(Text(line, overflow="ellipsis", no_wrap=True))
        elif step % self._every == 0 or step == self._steps or "eval_loss" in values:
            self.say(Text(line))
        if self._live and "eval_loss" in values:
            self.say(Text(line))


class _Output(Console):
    """A console that goes quiet on a broken pipe, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        flush_or_drop(self.file)


def _smoothed(before: float | None, value: float) -> float:
    """The exponential moving average with factor 0.9; the first value is taken as it is."""
    return value if before is None else 0.9 * before + 0.1 * value


_FORMS = {  # formats of metrics, in the order of the line
    "loss": "loss {:.4f}",
    "smoothed_loss": "smoothed {:.4f}",
    "grad_norm": "grad_norm {:.3f}",
    "lr": "lr {:.2e}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "tokens_per_second_per_device": "{:,.0f} tokens/s/device",
    "mfu": "MFU {:.1%}",
    "step_seconds": "{:.3f} s/step",
    "packing_efficiency": "{:.1%} no padding",
    "eval_loss": "eval_loss {:.4f}",
}
_MEMORY = "peak_memory_bytes"
_LOGGED_ONLY = {  # not shown, to keep the line short
    "loss_max", "z_loss", "target_tokens", "tokens_seen", "padded_tokens", "tflops_per_device",
    "data_seconds", "save_seconds", "eval_seconds", "lost_seconds",
    "evaluate_seconds",
}  # fmt: skip


def _numbers(values: Mapping[str, MetricValue]) -> dict[str, float]:
    return {name: value for name, value in values.items() if not isinstance(value, list)}


def describe(
    step: int, steps: int, values: Mapping[str, MetricValue], seconds: float | None
) -> str:
    """Format one step as a line; `seconds` is the smoothed time of a step, None: not yet known.

    Scalar metrics that layers return are shown by name; lists are omitted.

    >>> describe(5, 10, {"loss": 2.5, "grad_norm": 1, "lr": 1e-3, "step_seconds": 0.5}, 2.0)
    'step 5/10  loss 2.5000  grad_norm 1.000  lr 1.00e-03  0.500 s/step  ETA 0:00:10'
    """
    parts, numbers = [f"step {step}/{steps}"], _numbers(values)
    parts += [form.format(numbers[name]) for name, form in _FORMS.items() if name in numbers]
    if _MEMORY in numbers:
        parts.append(f"memory {numbers[_MEMORY] / 2**30:.1f} GiB")
    parts += [
        f"{name} {value:.4g}"
        for name, value in numbers.items()
        if name not in {*_FORMS, _MEMORY, *_LOGGED_ONLY}
    ]
    if seconds is not None:
        parts.append(f"ETA {timedelta(seconds=round(seconds * (steps - step)))}")
    return "  ".join(parts)
