"""Pipeline parallelism: model contract, mesh, schedules, split of a layer, executor.

Imports jax, numpy and itself alone. The names below are loaded when they are first used, so that
schedules need no jax.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "contract": ("Aux", "Context", "LayerKind", "LayerOutput", "StageFunctions"),
    "contract.parameter": ("ParamSpec",),
    "executor": ("Execution", "Pipeline", "StepOutput", "loss_and_gradients", "step_ref"),
    "mesh": ("Sharding", "StageLayout", "make_mesh"),
    "schedule": (
        "Action", "Costs", "Lockstep", "Op", "Placement", "Schedule", "ScheduleError", "bfs",
        "dualpipe", "dualpipev", "gpipe", "interleaved_1f1b", "interleaved_zb", "label", "lower",
        "one_f_one_b", "one_f_one_b_v", "read_schedule", "simulate", "validate", "write_schedule",
        "zb_h1", "zb_h2", "zbv_order",
    ),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
