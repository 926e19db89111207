"""All XLA options that a step is compiled with, each with its reason.

They are experimental options, whose names and values change between releases. An option that the
installed XLA does not know is left out with a warning.
"""

import os
import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

import jax

from jaxpipe.config import Config, ConfigError

OptionValue = bool | int | str

_GPUS = ("gpu", "cuda")
_LEAST_ON_GPUS = (0, 11)  # first jax for which `plan --check-gpu` finds no ring buffer copies
_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,COLLECTIVES,CONDITIONAL,DYNAMIC_SLICE_FUSION"


class Option(NamedTuple):
    """One XLA option: when it is given, its values, its reason, and what notices its loss.

    Attributes:
      name: as in XLA_FLAGS, without dashes.
      purpose: when it is given. `step`: to every step; `offload`: with `train.offload_layers`;
        `deterministic`: with `train.deterministic`; `ring`: with `parallel.cp_method="ring"`;
        `deviceless`: only in `plan --check-gpu`, which has no device; `costs`: in that check, for
        GPUs that XLA's cost model knows.
      values: value by the first jax version for which it is right; the entry with the newest
        version that is not newer than the installed jax applies.
      why: the reason.
      noticed: the entry of the `plan --check-gpu --json` report that changes without it; "" where
        only a device shows its effect.
    """

    name: str
    purpose: str
    values: Mapping[str, OptionValue]
    why: str
    noticed: str = ""

    @property
    def value(self) -> OptionValue | None:
        """The value for the installed jax; None where jax is older than every entry."""
        known = [one for since, one in self.values.items() if _version(since) <= _installed()]
        return known[-1] if known else None


# xla_gpu_enable_while_loop_unrolling is left out because it copies every gradient accumulator in
# ticks without a backward (see README.md in this folder).
TABLE = (
    Option(
        "xla_disable_hlo_passes",
        "step",
        {"0.10": "collective-permute-motion,dot-merger"},
        "The first moves permutes to where nothing is left to hide them behind. The second makes "
        "one product of the gradients of wq, wk and wv; where two conditionals add to them (BW "
        "beside W), their sums are then copied in every tick.",
        "permutes.hidden",
    ),
    Option(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        "step",
        {"0.10": 1000},
        "Both permutes of a tick are in flight at once, and stay so behind conditionals that hold "
        "many collectives of their own. The default of 1 makes the second permute synchronous; 4 "
        "ends both behind two of four conditionals for the 70B with tp=4, and for the 8B with "
        "cp=2; 1000 behind all four.",
        "permutes.synchronous",
    ),
    Option(
        "xla_gpu_enable_latency_hiding_scheduler",
        "step",
        {"0.10": True},
        "On A100s, of whose rates XLA has no tables, permutes are otherwise behind one of four "
        "conditionals. On H100s XLA makes the same program without being told.",
        "permutes.hidden",
    ),
    Option(
        "xla_gpu_enable_command_buffer",
        "step",
        {"0.10": _GRAPHS, "0.12": f"{_GRAPHS},COLLECTIVES_KERNEL"},
        "A whole tick becomes one CUDA graph: outside a graph every conditional stops the host "
        "until the device has told it which branch to take.",
        "graphs.whole",
    ),
    Option(
        "xla_gpu_enable_triton_gemm",
        "step",
        {"0.10": False},
        "Products are cuBLAS's, which reads a layer's weights in the stack of all layers and adds "
        "a gradient to its sum in place. Where XLA may choose Triton, it copies each of them "
        "first, and tunes 8-bit products for minutes (jax 0.11.2 on an H200).",
        "products",
    ),
    Option(
        "xla_gpu_experimental_parallel_async_compute_limit",
        "offload",
        {"0.10": 1000},
        "All copies between device and host of a layer are in flight at once, while others "
        "compute. With the default of 2 most have no product between their start and their end.",
        "host_copies.hidden",
    ),
    # Without it, scatter-adds (here the embedding's gradient) add in the order in which threads
    # arrive (XLA's docs/determinism.md).
    Option(
        "xla_gpu_deterministic_ops",
        "deterministic",
        {"0.10": True},
        "No operation adds in an order that changes from run to run: scattered values are sorted "
        "first.",
    ),
    Option(
        "xla_gpu_autotune_level",
        "deterministic",
        {"0.10": 0},
        "No kernel is chosen by a measured time: two compilations would choose differently.",
    ),
    Option(
        "xla_gpu_autotune_level",
        "deviceless",
        {"0.10": 0},
        "Without a device nothing can be timed.",
    ),
    Option(
        "xla_gpu_collect_cost_model_stats",
        "costs",
        {"0.10": True},
        "XLA's cost model writes beside each kernel how long it would take.",
        "seconds",
    ),
    # At the first call of a collective, the threads of all its devices in a process wait for each
    # other (openxla/xla#38932), and by default all devices of the program take part in a permute. A
    # ring's permutes are in branches that pipeline ranks take at different ticks, so a rank could
    # wait for another rank that waits for its message: a deadlock.
    Option(
        "xla_gpu_collective_permute_connected_components",
        "ring",
        {"0.10": True},
        "To a permute belong only the devices that it connects: those of one ring, which take the "
        "same branches. NCCL is faster so, too (openxla/xla#40505).",
    ),
)


def of_purpose(purpose: str) -> tuple[Option, ...]:
    """The options in `TABLE` with this purpose."""
    return tuple(option for option in TABLE if option.purpose == purpose)


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def _installed() -> tuple[int, ...]:
    return jax.__version_info__


def purposes_of(config: Config) -> tuple[str, ...]:
    """The purposes for which the step of this configuration has options, besides `step`."""
    train = config.train
    asked = {
        "offload": train.offload_layers,
        "deterministic": train.deterministic,
        "ring": config.parallel.rings,
    }
    return tuple(purpose for purpose, is_asked in asked.items() if is_asked)


def options(platform: str, *purposes: str) -> dict[str, OptionValue]:
    """`compiler_options` for a jitted step on devices of this platform; empty except on GPUs.

    Options that XLA_FLAGS names are left to the user. Warns (`UserWarning`) about each option that
    the installed XLA does not know.

    Args:
      platform: `jax.Device.platform`.
      purposes: purposes besides `step` (`purposes_of`).
    """
    own = wanted(platform, *purposes)
    known, dropped = accepted(own)
    for sentence in dropped:
        warnings.warn(sentence, stacklevel=2)
    return known


def wanted(platform: str, *purposes: str) -> tuple[Option, ...]:
    """The options for this platform (`jax.Device.platform`), whether XLA knows them or not."""
    if platform not in _GPUS:
        return ()
    own = (option for purpose in ("step", *purposes) for option in of_purpose(purpose))
    return tuple(option for option in own if not _is_the_users(option.name))


def check_version(platform: str) -> None:
    """Raise `ConfigError` if the installed jax is too old to train on devices of this platform."""
    if platform in _GPUS and jax.__version_info__ < _LEAST_ON_GPUS:
        least = ".".join(map(str, _LEAST_ON_GPUS))
        raise ConfigError(
            f"jax {jax.__version__} copies every ring of a pipeline in every tick on GPUs: install "
            f"jax {least} or later, for Python 3.12 or later."
        )


def check_deterministic(platform: str) -> None:
    """Raise `ConfigError` if steps on this platform cannot be made deterministic."""
    _check(platform, "deterministic", "train.deterministic=true", "leave train.deterministic out")


def check_rings(platform: str) -> None:
    """Raise `ConfigError` if ring attention could deadlock on devices of this platform."""
    _check(
        platform, "ring", "parallel.cp_method='ring'", "set parallel.cp_method=ulysses or gather"
    )


def _check(platform: str, purpose: str, setting: str, remedy: str) -> None:
    """Raise `ConfigError` if XLA or XLA_FLAGS rules out an option that a setting needs."""
    if platform not in _GPUS:
        return
    for option in of_purpose(purpose):
        name = option.name
        if _is_the_users(name):
            raise ConfigError(
                f"{setting} gives {name} its value, but XLA_FLAGS names it too: take it out of "
                f"XLA_FLAGS, or {remedy}."
            )
        if refusal := _refusal(name, option.value):
            raise ConfigError(
                f"{setting} needs {name}={option.value}, but this XLA says {refusal!r}: use "
                f"another jax, or {remedy}."
            )


def _is_the_users(name: str) -> bool:
    return f"--{name}" in (one.split("=")[0] for one in os.environ.get("XLA_FLAGS", "").split())


def accepted(own: Iterable[Option]) -> tuple[dict[str, OptionValue], list[str]]:
    """The options that the installed XLA knows, and a sentence for each of the others."""
    kept: dict[str, OptionValue] = {}
    dropped = []
    for option in own:
        value = option.value
        refusal = _refusal(option.name, value)
        if value is not None and refusal is None:
            kept[option.name] = value
        else:
            dropped.append(f"{option.name} is left out: this XLA says {refusal!r}.")
    return kept, dropped


@cache
def _refusal(name: str, value: OptionValue | None) -> str | None:
    """The reason against an option, from XLA or from the table; None if there is none.

    XLA parses the options of every platform on any platform, so compiling a constant for the
    default device (10 ms on CPU) shows whether it knows one.
    """
    if value is None:
        return f"there is no value for jax {jax.__version__}"
    given: dict[str, Any] = {name: value}  # jax 0.10 declares no integers
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=given)
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" not in str(error):
            raise
        return str(error)
    return None
