"""Seconds for which a layer waits for other devices: over tp, cp, ep, and dp where it is gathered.

What compute hides follows the programs that XLA compiles (`lab/gpu`): BW runs the products of W
beside its collectives, and layers that are gathered arrive while another one computes. F is one
chain, in which nothing is left to run beside a collective, unless layers run in halves.
"""

from collections.abc import Callable
from functools import partial

from jaxpipe.config import Config
from jaxpipe.planning.cost.compute import OPS, seconds_by_kind
from jaxpipe.planning.cost.costs import LayerCosts, costs_of
from jaxpipe.planning.cost.machine import Group, Hardware
from jaxpipe.planning.cost.parameter_traffic import layer_traffic
from jaxpipe.planning.cost.seconds import NO_EXCHANGE, LayerSeconds


def sharing_of(config: Config, hardware: Hardware) -> LayerSeconds:
    """Seconds for which the mean layer waits for the replicas that share its sequences.

    A ring sends keys and values during attention to those already received, which is the causal
    half of attention without the last ring position's share. All other traffic is waited for.
    """
    costs, parallel = costs_of(config), config.parallel
    if parallel.cp == 1:
        return NO_EXCHANGE
    group = hardware.axes(parallel).cp
    collective = hardware.all_to_all if parallel.exchanging else hardware.ring
    behind = dict.fromkeys(OPS, 0.0)
    if parallel.rings:
        model, train = config.model, config.train
        whole = model.flops_per_token(train.seq_len) - model.flops_per_token(0)
        tokens = train.microbatch_size * train.seq_len / parallel.rows_per_sequence / parallel.tp
        others = (parallel.ring - 1) / parallel.ring
        # Of 12 FLOPs per query and key F computes 4, and causal attention reads half of the keys.
        forwards = whole / len(costs.order) * tokens / 6 / hardware.attention_flops * others
        again = 1 if train.remat == "full" else 0
        behind |= {"F": forwards, "B": (2.5 + again) * forwards, "R": forwards}

    def waits(kind: LayerCosts, op: str) -> float:
        sent, turned, calls = kind.shared[op], kind.turned[op], kind.calls["shared"][op]
        seconds = collective(sent - turned, group, calls) if sent > turned else 0.0
        if turned:
            seconds += max(0.0, hardware.neighbour(turned, group) - behind[op])
        return seconds

    return LayerSeconds(**{op: costs.mean(partial(waits, op=op)) for op in "FBWR"})


def tensor_of(config: Config, hardware: Hardware) -> LayerSeconds:
    """Seconds for which the mean layer waits for collectives over tp, which BW hides.

    Sizes are traced; those of embedding and head are left out.
    """
    group = hardware.axes(config.parallel).tp

    def seconds(kind: LayerCosts, op: str) -> float:
        return hardware.ring(kind.tensor[op], group, kind.calls["tensor"][op])

    return _behind_weights(config, hardware, seconds)


def exchange_of(config: Config, hardware: Hardware) -> LayerSeconds:
    """Seconds for which the mean layer waits for all-to-alls over ep, which BW hides."""
    parallel, group = config.parallel, hardware.axes(config.parallel).ep
    hosts, in_host = Group(parallel.ep_hosts, 1), Group(parallel.ep_per_host, parallel.ep_per_host)

    def seconds(kind: LayerCosts, op: str) -> float:
        sent, calls = kind.exchanged[op], kind.calls["exchanged"][op]
        if parallel.ep_hosts == 1:
            return hardware.all_to_all(sent, group, calls)
        spread, calls = kind.spread[op], calls / 2
        between = hardware.all_to_all(sent - spread, hosts, calls)
        return between + hardware.all_to_all(spread, in_host, calls)

    return _behind_weights(config, hardware, seconds)


def _behind_weights(
    config: Config, hardware: Hardware, of: Callable[[LayerCosts, str], float]
) -> LayerSeconds:
    """Mean seconds of collectives, given of an op; of BW those that take longer than it computes.

    So it is of every op with `parallel.overlap_halves`; the first and the last collective of a
    stage, which nothing hides, are left out.
    """
    costs = costs_of(config)
    if not any(of(kind, op) for kind in costs.kinds.values() for op in "FBW"):
        return NO_EXCHANGE

    def waits(one: str, op: str) -> float:
        behind = getattr(compute[one], op) if config.parallel.overlap_halves else 0.0
        return max(0.0, of(costs.kinds[one], op) - behind)

    compute = seconds_by_kind(config, hardware)
    exposed = {
        one: max(0.0, of(kind, "B") + of(kind, "W") - compute[one].whole_backward)
        for one, kind in costs.kinds.items()
    }
    each = {op: costs.mean_of({one: waits(one, op) for one in costs.kinds}) for op in "FBWR"}
    return LayerSeconds(**each, BW=costs.mean_of(exposed))


def resharding_of(config: Config, hardware: Hardware) -> LayerSeconds:
    """Seconds for which the mean layer waits for its parameters where every action gathers them.

    Every op gathers a layer while another one computes, and W and BW reduce gradients as well.
    """
    if not config.parallel.reshards:
        return NO_EXCHANGE
    costs, sent = costs_of(config), layer_traffic(config)
    group, compute = hardware.axes(config.parallel).shards, seconds_by_kind(config, hardware)

    def waits(name: str, op: str) -> float:
        if op == "R" and not costs.kinds[name].for_r:
            return 0.0
        gathered, reduced = sent[name]
        size = gathered + reduced * ("W" in op)
        moved = hardware.ring(size, group, 1 + ("W" in op))
        return max(0.0, moved - getattr(compute[name], op))

    each = {op: costs.mean_of({name: waits(name, op) for name in costs.kinds}) for op in OPS}
    return LayerSeconds(**each)
