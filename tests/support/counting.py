"""FLOPs of the matrix products that a function computes."""

from math import prod

import jax


def dot_flops(function, *args):
    """Count two for each multiply-add in the traced equations, without those of inner calls."""
    total = 0
    for eqn in jax.make_jaxpr(function)(*args).jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contract, _), _ = eqn.params["dimension_numbers"]
            left = eqn.invars[0].aval.shape
            total += 2 * prod(eqn.outvars[0].aval.shape) * prod(left[axis] for axis in contract)
    return total
