"""Seconds for which a layer waits for other devices: over tp, cp, and dp where it is gathered."""

from typing import TYPE_CHECKING

from jaxpipe.config import Config
from jaxpipe.planning.cost.costs import costs_of
from jaxpipe.planning.cost.parameter_traffic import layer_traffic
from jaxpipe.planning.cost.seconds import NO_EXCHANGE, LayerSeconds

if TYPE_CHECKING:
    from jaxpipe.planning.cost.hardware import Hardware

_OPS = ("F", "B", "W", "R")


def sharing_of(config: Config, hardware: "Hardware") -> LayerSeconds:
    """Seconds for which the mean layer waits for the replicas that share its sequences.

    A ring sends keys and values during attention to those already received, which is the causal
    half of attention without the last ring position's share. All other traffic is waited for.
    """
    costs, parallel = costs_of(config), config.parallel
    if parallel.cp == 1:
        return NO_EXCHANGE
    behind = dict.fromkeys(_OPS, 0.0)
    if parallel.rings:
        model, train = config.model, config.train
        whole = model.flops_per_token(train.seq_len) - model.flops_per_token(0)
        parts = parallel.rows_per_sequence * parallel.tp
        tokens = train.microbatch_size * train.seq_len / parts
        others = (parallel.ring - 1) / parallel.ring
        # Of 12 FLOPs per query and key F computes 4, and causal attention reads half of the keys.
        forwards = whole / len(costs.order) * tokens / 6 / hardware.flops * others
        again = 1 if train.remat == "full" else 0
        behind |= {"F": forwards, "B": (2.5 + again) * forwards, "R": forwards}

    def waits(op: str) -> float:
        sent = costs.mean(lambda kind: kind.shared[op]) / hardware.network
        turned = costs.mean(lambda kind: kind.turned[op]) / hardware.network
        return sent - turned + max(0.0, turned - behind[op])

    return LayerSeconds(**{op: waits(op) for op in _OPS})


def tensor_of(config: Config, hardware: "Hardware") -> LayerSeconds:
    """Seconds of the mean layer's collectives over tp, within a host and with nothing beside them.

    Sizes are traced; those of embedding and head are left out.
    """
    costs = costs_of(config)
    return LayerSeconds(
        **{op: costs.mean(lambda kind, op=op: kind.tensor[op]) / hardware.within for op in _OPS}
    )


def resharding_of(config: Config, hardware: "Hardware") -> LayerSeconds:
    """Seconds for which the mean layer waits for its parameters where every action gathers them.

    F, B and W gather a layer while another one computes, and W reduces gradients as well.
    """
    if not config.parallel.reshards:
        return NO_EXCHANGE
    costs, sent = costs_of(config), layer_traffic(config)
    waits = dict.fromkeys(_OPS, 0.0)
    for name in costs.order:
        kind, (gathered, reduced) = costs.kinds[name], sent[name]
        for op in _OPS:
            size = gathered + reduced * (op == "W")
            compute = hardware.seconds(getattr(kind, op), kind.in_fp8[op])
            waits[op] += max(0.0, size / hardware.network - compute) / len(costs.order)
    return LayerSeconds(**waits)
