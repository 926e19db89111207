"""Operations of the matrix products that a function computes."""

from math import prod

import jax


def dot_flops(function, *args):
    """Two for each multiply-add, from the traced equations; calls inside are not looked into."""
    total = 0
    for eqn in jax.make_jaxpr(function)(*args).jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contract, _), _ = eqn.params["dimension_numbers"]
            left = eqn.invars[0].aval.shape
            total += 2 * prod(eqn.outvars[0].aval.shape) * prod(left[axis] for axis in contract)
    return total
