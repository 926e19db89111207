"""What XLA is told when it compiles a step, and why: every option of the project stands here.

The options are experimental ones of XLA, and their names and values change between releases: one
that the installed XLA does not know is left out with a warning, never an error.
"""

import os
import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

import jax

from jaxpipe.config import Config, ConfigError

Value = bool | int | str

_GPUS = ("gpu", "cuda")
_LEAST_ON_GPUS = (0, 11)  # of jax: `plan --check-gpu` finds no copies of rings from it on
_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,COLLECTIVES,CONDITIONAL,DYNAMIC_SLICE_FUSION"


class Option(NamedTuple):
    """One option of XLA: what it is for, its values, its reason, and what notices its loss.

    Attributes:
      purpose: `step`: of every step; `offload`: with `train.offload_layers`; `moments`: with
        `train.offload_moments`; `deterministic`: with `train.deterministic`; `ring`: with
        `parallel.cp_method="ring"`; `deviceless`: of the check alone, which has no device; `costs`:
        of the check for cards that XLA's cost model knows.
      values: by the jax from which on each is right; the newest that is not newer than the
        installed is taken.
      noticed: what changes in the report of `plan --check-gpu` without it, as `--json` names it;
        "" where only a device shows it.
    """

    name: str
    purpose: str
    values: Mapping[str, Value]
    why: str
    noticed: str = ""

    @property
    def value(self) -> Value | None:
        """What the installed jax is given; None where it is older than every value."""
        known = [one for since, one in self.values.items() if _version(since) <= _installed()]
        return known[-1] if known else None


# Not among them, since it copies every gradient accumulator in ticks without a backward:
# xla_gpu_enable_while_loop_unrolling. What else was judged: README.md beside this file.
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
        {"0.10": _GRAPHS, "0.11": f"{_GRAPHS},COLLECTIVES_KERNEL"},
        "A whole tick becomes one CUDA graph: outside a graph every conditional stops the host "
        "until the device has told it which branch to take.",
        "graphs.whole",
    ),
    Option(
        "xla_gpu_experimental_parallel_async_compute_limit",
        "offload",
        {"0.10": 1000},
        "All copies between device and host of a layer are in flight at once, while others "
        "compute. With the default of 2 most have no product between their start and their end.",
        "host_copies.hidden",
    ),
    Option(
        "xla_gpu_memory_limit_slop_factor",
        "moments",
        {"0.10": 190},
        "XLA's scheduler counts moments on the host as if they took the device's memory, and where "
        "little is left by that account it makes permutes synchronous. With twice its default of "
        "95 % of what is left they are not.",
        "permutes.synchronous",
    ),
    # XLA (its docs/determinism.md, and the code that hands attention to cuDNN): sums of scattered
    # values, the embedding's gradient here, and the gradient of cuDNN's attention are otherwise
    # added in the order in which threads come.
    Option(
        "xla_gpu_deterministic_ops",
        "deterministic",
        {"0.10": True},
        "No operation adds in an order that changes from run to run. Scattered values are sorted "
        "first, and cuDNN is asked for its deterministic kernels.",
    ),
    Option(
        "xla_gpu_autotune_level",
        "deterministic",
        {"0.10": 0},
        "No kernel is chosen by a measured time: two compilations would choose differently.",
    ),
    Option(
        "xla_gpu_enable_triton_gemm",
        "deviceless",
        {"0.10": False},
        "Products go to cuBLAS, as they mostly do after tuning; an untuned Triton kernel would "
        "need other temporary memory.",
        "products",
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
    # At the first call of a collective XLA lets the threads of all its devices in a process wait
    # for each other (openxla/xla#38932), and to a permute belong all devices of the program. A
    # ring's permutes stand in branches, which ranks of a pipeline take at different ticks: a rank
    # would wait for one that waits for its message.
    Option(
        "xla_gpu_collective_permute_connected_components",
        "ring",
        {"0.10": True},
        "To a permute belong only the devices that it connects: those of one ring, which take the "
        "same branches. NCCL is faster so, too (openxla/xla#40505).",
    ),
)


def of_purpose(purpose: str) -> tuple[Option, ...]:
    """The table's options for it."""
    return tuple(option for option in TABLE if option.purpose == purpose)


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def _installed() -> tuple[int, ...]:
    return jax.__version_info__


def purposes_of(config: Config) -> tuple[str, ...]:
    """What its step has options for, beside those of every step."""
    train = config.train
    asked = {
        "offload": train.offload_layers,
        "moments": train.offload_moments,
        "deterministic": train.deterministic,
        "ring": config.parallel.rings,
    }
    return tuple(purpose for purpose, is_asked in asked.items() if is_asked)


def options(platform: str, *purposes: str) -> dict[str, Value]:
    """`compiler_options` of a jitted step on devices of this platform; none but for GPUs.

    `purposes` are those beside `step` (`purposes_of`).
    An option that XLA_FLAGS names is the user's and is left out. Warns (`UserWarning`) of each
    that the installed XLA does not know.
    """
    own = wanted(platform, *purposes)
    kept, dropped = accepted(own)
    for sentence in dropped:
        warnings.warn(sentence, stacklevel=2)
    return kept


def wanted(platform: str, *purposes: str) -> tuple[Option, ...]:
    """The options for devices of this platform (`jax.Device.platform`) before XLA is asked."""
    if platform not in _GPUS:
        return ()
    own = (option for purpose in ("step", *purposes) for option in of_purpose(purpose))
    return tuple(option for option in own if not _is_the_users(option.name))


def check_version(platform: str) -> None:
    """Raise `ConfigError` where the installed jax should not train on devices of this platform."""
    if platform in _GPUS and jax.__version_info__ < _LEAST_ON_GPUS:
        least = ".".join(map(str, _LEAST_ON_GPUS))
        raise ConfigError(
            f"jax {jax.__version__} copies every ring of a pipeline in every tick on GPUs: install "
            f"jax {least} or later, for Python 3.12 or later."
        )


def check_deterministic(platform: str) -> None:
    """Raise `ConfigError` where devices of this platform cannot be told to be deterministic."""
    _check(platform, "deterministic", "train.deterministic=true", "leave train.deterministic out")


def check_rings(platform: str) -> None:
    """Raise `ConfigError` where rings of devices of this platform might wait for ever."""
    _check(
        platform, "ring", "parallel.cp_method='ring'", "set parallel.cp_method=ulysses or gather"
    )


def _check(platform: str, purpose: str, setting: str, remedy: str) -> None:
    """Raise `ConfigError` where an option that a setting needs is not ours to give."""
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
    return f"--{name}" in os.environ.get("XLA_FLAGS", "")


def accepted(own: Iterable[Option]) -> tuple[dict[str, Value], list[str]]:
    """The options that the installed XLA knows, and a sentence for each that it does not."""
    kept, dropped = {}, []
    for option in own:
        refusal = _refusal(option.name, option.value)
        if refusal is None:
            kept[option.name] = option.value
        else:
            dropped.append(f"{option.name} is left out: this XLA says {refusal!r}.")
    return kept, dropped


@cache
def _refusal(name: str, value: Value | None) -> str | None:
    """What XLA, or the table, has against an option; None if nothing.

    XLA reads the options of every platform on each, so a constant compiled for the default device
    (10 ms on CPU) tells.
    """
    if value is None:
        return f"there is no value for jax {jax.__version__}"
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" not in str(error):
            raise
        return str(error)
    return None
