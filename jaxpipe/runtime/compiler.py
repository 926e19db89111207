"""What XLA is told when it compiles a step, and why: every option of the project stands here.

The options are experimental ones of XLA, and their names and values change between releases: one
that the installed XLA does not know is left out with a warning, never an error.
"""

import os
import warnings
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import jax

from jaxpipe.config import ConfigError

Value = bool | int | str

_GPUS = ("gpu", "cuda")
_LEAST_ON_GPUS = (0, 11)  # of jax: `plan --check-gpu` finds no copies of rings from it on
_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,COLLECTIVES,CONDITIONAL,DYNAMIC_SLICE_FUSION"


class Option(NamedTuple):
    """One option of XLA: its values, the first that XLA knows is taken, and its reason."""

    name: str
    values: tuple[Value, ...]
    why: str


# Each of these is needed: without it the AOT check (`plan --check-gpu`) shows what its reason
# says. jax 0.10.2, 0.11.2 and 0.12.0 know them all. Not among them, because it copies every
# gradient accumulator in ticks without a backward: xla_gpu_enable_while_loop_unrolling.
GPU = (
    Option(
        "xla_disable_hlo_passes",
        ("collective-permute-motion,dot-merger",),
        "The first moves permutes to where nothing is left to hide them behind. The second makes "
        "one product of the gradients of wq, wk and wv; where two conditionals add to them (BW "
        "beside W), their sums are then copied in every tick.",
    ),
    Option(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        (1000,),
        "Both permutes of a tick are in flight at once, and stay so behind conditionals that hold "
        "many collectives of their own. The default of 1 makes the second permute synchronous; 4 "
        "ends both behind two of four conditionals for the 70B with tp=4, and for the 8B with "
        "cp=2; 1000 behind all four.",
    ),
    Option(
        "xla_gpu_enable_command_buffer",
        (f"{_GRAPHS},COLLECTIVES_KERNEL", _GRAPHS),
        "A whole tick becomes one CUDA graph: outside a graph every conditional stops the host "
        "until the device has told it which branch to take. jax 0.10 lacks the last kind.",
    ),
)

# With `train.offload_layers`.
OFFLOAD = (
    Option(
        "xla_gpu_experimental_parallel_async_compute_limit",
        (1000,),
        "All copies between device and host of a layer are in flight at once, while others "
        "compute. With the default of 2 most have no product between their start and their end.",
    ),
)

# With `train.deterministic`. XLA (its docs/determinism.md, and the code that hands attention to
# cuDNN): sums of scattered values, the embedding's gradient here, and the gradient of cuDNN's
# attention are otherwise added in the order in which threads come.
DETERMINISTIC = (
    Option(
        "xla_gpu_deterministic_ops",
        (True,),
        "No operation adds in an order that changes from run to run. Scattered values are sorted "
        "first, and cuDNN is asked for its deterministic kernels.",
    ),
    Option(
        "xla_gpu_autotune_level",
        (0,),
        "No kernel is chosen by a measured time: two compilations would choose differently.",
    ),
)

# With `parallel.cp_method="ring"`. At the first call of a collective XLA lets the threads of all
# its devices in a process wait for each other (openxla/xla#38932), and to a permute belong all
# devices of the program. A ring's permutes stand in branches, which ranks of a pipeline take at
# different ticks: a rank would wait for one that waits for its message.
RING = (
    Option(
        "xla_gpu_collective_permute_connected_components",
        (True,),
        "To a permute belong only the devices that it connects: those of one ring, which take the "
        "same branches. NCCL is faster so, too (openxla/xla#40505).",
    ),
)


def options(
    platform: str, *, deterministic: bool = False, offloads: bool = False, rings: bool = False
) -> dict[str, Value]:
    """`compiler_options` of a jitted step on devices of this platform; none but for GPUs.

    An option that XLA_FLAGS names is the user's and is left out. Warns (`UserWarning`) of each
    that the installed XLA does not know.
    """
    own = wanted(platform, deterministic=deterministic, offloads=offloads, rings=rings)
    kept, dropped = accepted(own)
    for sentence in dropped:
        warnings.warn(sentence, stacklevel=2)
    return kept


def wanted(
    platform: str, *, deterministic: bool = False, offloads: bool = False, rings: bool = False
) -> tuple[Option, ...]:
    """The options for devices of this platform (`jax.Device.platform`) before XLA is asked."""
    if platform not in _GPUS:
        return ()
    own = GPU + OFFLOAD * offloads + DETERMINISTIC * deterministic + RING * rings
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
    _check(platform, DETERMINISTIC, "train.deterministic=true", "leave train.deterministic out")


def check_rings(platform: str) -> None:
    """Raise `ConfigError` where rings of devices of this platform might wait for ever."""
    _check(platform, RING, "parallel.cp_method='ring'", "set parallel.cp_method=ulysses or gather")


def _check(platform: str, needed: tuple[Option, ...], setting: str, remedy: str) -> None:
    """Raise `ConfigError` where options that a setting needs are not ours to give."""
    if platform not in _GPUS:
        return
    for name, values, _ in needed:
        if _is_the_users(name):
            raise ConfigError(
                f"{setting} gives {name} its value, but XLA_FLAGS names it too: take it out of "
                f"XLA_FLAGS, or {remedy}."
            )
        if refusal := _refusal(name, values[0]):
            raise ConfigError(
                f"{setting} needs {name}={values[0]}, but this XLA says {refusal!r}: use another "
                f"jax, or {remedy}."
            )


def _is_the_users(name: str) -> bool:
    return f"--{name}" in os.environ.get("XLA_FLAGS", "")


def accepted(own: Iterable[Option]) -> tuple[dict[str, Value], list[str]]:
    """The options that the installed XLA knows, and a sentence for each that it does not."""
    kept, dropped = {}, []
    for name, values, _ in own:
        refusals = {value: _refusal(name, value) for value in values}
        known = [value for value, refusal in refusals.items() if refusal is None]
        if known:
            kept[name] = known[0]
        else:
            dropped.append(f"{name} is left out: this XLA says {refusals[values[-1]]!r}.")
    return kept, dropped


@cache
def _refusal(name: str, value: Value) -> str | None:
    """What XLA has against an option; None if nothing.

    XLA reads the options of every platform on each, so a constant compiled for the default device
    (10 ms on CPU) tells.
    """
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" not in str(error):
            raise
        return str(error)
    return None
