"""The functions of jax that jaxpipe uses although jax does not document them.

A new version of jax may change each of them. `tests/test_jax_internals.py` calls all of them with
the oldest, the current and the newest version.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from typing import Any, Literal

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Primitive
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.interpreters.partial_eval import dce_jaxpr

Mask = Literal["NO_MASK", "CAUSAL", "PADDING_CAUSAL"]


def define_primitive(
    name: str,
    shapes: Callable[..., Sequence[jax.ShapeDtypeStruct]],
    lower: Callable[..., Sequence[jax.Array]],
) -> Primitive:
    """Create a primitive with several results, which can be traced on any platform.

    Args:
      name: of the primitive, in jaxprs.
      shapes: `(*operands, **parameters)` to the shape and dtype of each result; operands have a
        shape and a dtype.
      lower: `(*operands, **parameters)` to the results, traced when the primitive is compiled.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    @primitive.def_abstract_eval
    def _(*operands: ShapedArray, **parameters: Any) -> list[ShapedArray]:
        return [ShapedArray(a.shape, a.dtype) for a in shapes(*operands, **parameters)]

    mlir.register_lowering(primitive, mlir.lower_fun(lower, multiple_results=True))
    return primitive


def cudnn_attention(
    name: Literal["fwd", "bwd"], width: int, mask: Mask, window: int
) -> tuple[Primitive, dict[str, Any]]:
    """Return jax's primitive for one of cuDNN's calls with heads of this width, and its parameters.

    Its operands are `[B, L, H, K]`. It can be bound on any platform, and runs on GPUs only. jax's
    public function needs a GPU when it is traced, and supports neither documents nor a gradient of
    the log-sum-exp that it can return.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    parameters: dict[str, Any] = {
        "scale": width**-0.5,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": cudnn.MaskType[mask],
        "layout": cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": window or None,
    }
    if jax.__version_info__ >= (0, 12):
        parameters |= {"score_mod_name": None, "score_mod_jaxpr": None}
    return getattr(cudnn, f"_dot_product_attention_{name}_p"), parameters


def used_inputs(closed: ClosedJaxpr, wanted: Sequence[bool]) -> list[bool]:
    """Return whether each input of a jaxpr is needed for the outputs that are `wanted`."""
    return dce_jaxpr(closed.jaxpr, list(wanted))[1]


def keep_outputs(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[bool]]:
    """Return a jaxpr without the equations that its outputs do not need, also inside of calls.

    The second value says of each input whether the jaxpr still has it.
    """
    jaxpr, used = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return closed.replace(jaxpr=jaxpr), used


def set_memory_kinds(lowered: jax.stages.Lowered, kinds: Sequence[str]) -> None:
    """Write into a lowered program in which memory each argument of its function is.

    For devices that are present jax does so itself. A sharding on devices of a topology has no
    memory kind, whatever it was given, and XLA then reads arguments in host memory without a copy
    and counts none of the memory for it.

    Args:
      lowered: the program, which is changed.
      kinds: "device" or "pinned_host" for every leaf of the function's arguments.
    """
    module: Any = lowered.compiler_ir()
    (main,) = (op for op in module.body.operations if str(op.attributes["sym_name"]) == '"main"')
    used = sorted(lowered._lowering.compile_args["kept_var_idx"])  # jax drops unused arguments
    with module.context:
        attributes = [
            ir.DictAttr.get(
                {one.name: one.attr for one in given}
                | {"mhlo.memory_kind": ir.StringAttr.get(kinds[index])}
            )
            for given, index in zip(main.arg_attrs, used, strict=True)
        ]
        main.arg_attrs = ir.ArrayAttr.get(attributes)


def store_programs_if(accepts: Callable[[Any], bool], where: str) -> None:
    """Let jax's compile cache store a compiled program only if it is accepted.

    Args:
      accepts: takes the executable, which has `hlo_modules()`.
      where: what a process that loads a program must have in common with the one that stored it;
        a part of the program's key.
    """
    from jax._src import cache_key, compilation_cache

    cache_key.custom_hook = lambda: where

    store = compilation_cache.put_executable_and_time

    def store_accepted(key: str, module: str, executable: Any, *args: Any) -> None:
        if accepts(executable):
            store(key, module, executable, *args)

    # `*args`, because the rest differs between versions of jax.
    compilation_cache.put_executable_and_time = store_accepted  # type: ignore[assignment]


@cache  # once in a process
def give_collectives_channels() -> None:
    """Let jax give each collective of a program for CPUs a channel of its own.

    XLA for CPUs begins a collective while a loop or branch before it still runs, if it needs none
    of their results, and knows it by its kind, devices and channel. jax gives all channel 1. A
    collective in the loop and the one behind it were then taken for one where a device began them
    in another order than its neighbour: devices received each other's values, waited for each other
    for ever, or aborted (jaxlib 0.12.0.1). On GPUs the order is that of a stream.
    """
    from jax._src.interpreters import mlir as lowering
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects.stablehlo import ChannelHandle

    lower = lowering.lower_jaxpr_to_module

    def lower_with_channels(*args: Any, platforms: Sequence[str], **how: Any) -> Any:
        lowered, numbers = lower(*args, platforms=platforms, **how), count(1)

        def give_channel(operation: Any) -> Any:
            if "channel_handle" in operation.attributes:
                kind = mlir.DEVICE_TO_DEVICE_TYPE
                operation.attributes["channel_handle"] = ChannelHandle.get(next(numbers), kind)
            return ir.WalkResult.ADVANCE

        if tuple(platforms) == ("cpu",):
            with lowered.module.context:
                lowered.module.operation.walk(give_channel)
        return lowered

    lowering.lower_jaxpr_to_module = lower_with_channels


def distributed_state() -> Any:
    """Return jax's record of this process: `client` of the coordination service (None in a run of
    one process), `process_id` and `num_processes`.
    """
    from jax._src import distributed

    return distributed.global_state
