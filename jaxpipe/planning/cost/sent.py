"""Bytes that a device sends in the collectives of a traced function."""

from typing import Literal, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn

from jaxpipe.planning.cost.inlining import bodies_of, bytes_of

_SHARES = {  # of an operand, which a device sends to `others` of `members` devices
    "ppermute": lambda others, members: 1.0,
    "psum": lambda others, members: 2 * others / members,
    "all_gather": lambda others, members: others,
    "all_to_all": lambda others, members: others / members,
    "reduce_scatter": lambda others, members: others / members,
}


class _Sends(NamedTuple):
    """A collective, or a loop, condition or call with `bodies` that have some."""

    eqn: JaxprEqn
    bodies: "list[list[_Sends]]"


def collectives_in(jaxpr: Jaxpr) -> list[_Sends]:
    """The collectives of a jaxpr, in the tree of its loops, conditions and calls."""
    found = []
    for eqn in jaxpr.eqns:
        bodies = [collectives_in(body) for body in bodies_of(eqn)]
        if eqn.primitive.name in _SHARES or any(bodies):
            found.append(_Sends(eqn, bodies))
    return found


def sent_bytes(
    collectives: list[_Sends],
    axes: tuple[str, ...],
    devices: int,
    iterations: float = 1,
    *,
    of: Literal["bytes", "turned", "spread", "calls"] = "bytes",
) -> float:
    """Bytes that each device sends in collectives over mesh axes of `devices` devices.

    Collectives may be in smaller groups. A permute sends its operand, an all-to-all and a
    reduce-scatter all of it but the device's own shard; an all-gather sends it to every other
    device; an all-reduce is a reduce-scatter and an all-gather of the shards. Loops count as in
    `operations_of`; of a condition the largest branch counts, and of branches for platforms the one
    that is not for CPU. With `of="turned"` only permutes count, with "spread" only those in groups
    of neighbours, and "calls" counts collectives.
    """
    total = 0.0
    for eqn, inner in collectives:
        name = eqn.primitive.name
        if name not in _SHARES:
            bodies = [sent_bytes(one, axes, devices, iterations, of=of) for one in inner]
            if name == "cond":
                total += bodies[-1] if eqn.params.get("branches_platforms") else max(bodies)
            else:
                times = {"scan": eqn.params.get("length", 1), "while": iterations}.get(name, 1)
                total += sum(bodies) * times
            continue
        over, groups = eqn.params.get("axis_name"), eqn.params.get("axis_index_groups")
        over = eqn.params.get("axes", ()) if over is None else over
        is_spread = groups and groups[0][1] - groups[0][0] == 1
        is_other = (of == "turned" and name != "ppermute") or (of == "spread" and not is_spread)
        if axes != ((over,) if isinstance(over, str) else over) or is_other:
            continue
        members = len(groups[0]) if groups else devices
        share = _SHARES[name](members - 1, members)
        total += 1.0 if of == "calls" else sum(map(bytes_of, eqn.invars)) * share
    return total
