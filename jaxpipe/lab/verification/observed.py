"""What a step computes, by name and without the mesh, and how far two steps are apart."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpipe.core.executor.reference import StepOutput
from jaxpipe.training.state import State
from jaxpipe.training.trainer import Trainer

Tree = Any
Arrays = Mapping[str, np.ndarray]
# Gradients below this share of the norm of all are compared with it: those of key biases, to which
# a softmax is invariant, are rounding alone, which is 1e-16 of the norm of all.
_ROUNDING = 1e-6


class Observed(NamedTuple):
    """The results of a step on any mesh.

    Attributes:
      losses: shares of the losses of microbatches, `[M]` or `[M, K]`, by name.
      gradients: of every parameter, by its name on disk, in full.
      update: what the step adds to every parameter.
      metrics: logged values and the variables after the step.
    """

    losses: Arrays
    gradients: Arrays
    update: Arrays
    metrics: Arrays

    @classmethod
    def of(
        cls, trainer: Trainer, before: State, after: State, metrics: Tree, outputs: StepOutput
    ) -> "Observed":
        """The results of a step from the states before and after it."""
        slices = trainer.schedule.slices
        losses = {"losses": outputs.losses, "auxiliary losses": outputs.aux_losses}
        old, new = (named_parameters(trainer, state.params) for state in (before, after))
        return cls(
            {
                name: np.asarray(values).reshape(-1, slices, *values.shape[1:]).sum(1)
                for name, values in losses.items()
                if values is not None
            },
            named_parameters(trainer, outputs.gradients),
            {name: new[name] - old[name] for name in old},
            {name: np.asarray(value) for name, value in metrics.items()}
            | {f"variables/{k}": np.asarray(v) for k, v in (after.variables or {}).items()},
        )


def named_parameters(trainer: Trainer, tree: Tree) -> dict[str, np.ndarray]:
    """Full arrays of a stage-stacked tree on a trainer's mesh, without padding, by name on disk."""
    stored = trainer.sharding.param_shardings(tree)

    def full(leaf: jax.Array, how: Any) -> np.ndarray:
        return np.asarray(leaf)[tuple(map(slice, how.unpadded_shape(leaf.shape)))]

    arrays = jax.tree.map(full, tree, stored)
    layers = trainer.layout.unstack(arrays["layers"])
    keyed = {"embed_head": arrays["embed_head"], "layers": dict(enumerate(layers))}
    return {
        "/".join(str(key.key) for key in path): leaf
        for path, leaf in jax.tree.leaves_with_path(keyed)
    }


class Deviation(NamedTuple):
    """The largest relative error among arrays of one sort, and the name of the array."""

    what: str
    error: float
    name: str


def compare(got: Observed, want: Observed, suffix: str = "") -> list[Deviation]:
    """The largest error of losses, gradients, the update and metrics, each with its array's name.

    The error of an array is the norm of the difference over the norm of the reference, but the
    latter counts as at least 1e-6 of the norm of all gradients or updates. Updates of trained
    parameters whose gradient is below that, hence rounding, are left out.
    """
    size = _norm(want.gradients)

    def is_compared(name: str) -> bool:
        gradients = [of.gradients[name] for of in (got, want) if name in of.gradients]
        has_gradient = any(np.linalg.norm(one) > _ROUNDING * size for one in gradients)
        return not gradients or has_gradient or not np.isfinite(want.update[name]).all()

    moved = set(filter(is_compared, want.update))
    updates = [{name: of.update[name] for name in moved} for of in (got, want)]
    return [
        _worst(f"losses{suffix}", got.losses, want.losses),
        _worst(f"gradients{suffix}", got.gradients, want.gradients, _ROUNDING * size),
        _worst(f"update{suffix}", *updates, _ROUNDING * _norm(updates[1])),
        _worst(f"metrics{suffix}", got.metrics, want.metrics, is_finite=False),
    ]


def compare_bits(what: str, got: Arrays, want: Arrays) -> Deviation:
    """The largest relative error between arrays that should have the same bits."""
    same = {name for name in want if np.array_equal(got[name], want[name])}
    rest = want.keys() - same
    return _worst(what, {k: got[k] for k in rest}, {k: want[k] for k in rest}, is_finite=False)


def _worst(
    what: str, got: Arrays, want: Arrays, floor: float = 0.0, *, is_finite: bool = True
) -> Deviation:
    """The largest error; infinite where `is_finite` and the reference is not: it proves nothing."""
    errors = {
        name: _error(got.get(name), values, floor)
        if np.isfinite(values).all() or not is_finite
        else float("inf")
        for name, values in want.items()
    }
    name = max(errors, key=lambda name: errors[name], default="")
    return Deviation(what, errors.get(name, 0.0), name)


def _error(got: np.ndarray | None, want: np.ndarray, floor: float) -> float:
    """|got - want| / |want|; infinite where shapes differ or one is not finite where it should."""
    if got is None or got.shape != want.shape:
        return float("inf")
    got, want = got.astype(np.float64), want.astype(np.float64)
    known = np.isfinite(want)
    if not np.array_equal(known, np.isfinite(got)):
        return float("inf")
    difference, size = np.linalg.norm((got - want)[known]), np.linalg.norm(want[known])
    return float(difference / (max(size, floor) or 1))


def _norm(arrays: Arrays) -> float:
    return float(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in arrays.values())))
