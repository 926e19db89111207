"""Cost of a layer with experts: FLOPs of its products, bytes that it sends to other replicas.

The layer is that of `jaxpipe.model.layers.moe`: attention as in `oracles.decoder`, a router, routed
SwiGLU experts, shared ones. Everything is for one microbatch on one device; experts are sharded
over `ep`, and the width of every expert over `tp`. With `over_tp` experts are whole, and a device
sends them 1 / tp of the tokens.

Without a capacity every choice of a token is a row; with one every expert has slots for each
sequence, full or not (Fedus et al. 2021, equation 3). Over ep a device has buffers for rows from
every other device, and multiplies them in full.
"""

import math

from msgspec.structs import replace

from jaxpipe.model.families.llama.config import LlamaConfig
from oracles.decoder import layer_flops
from oracles.flops import OpFlops


def expert_rows(
    model: LlamaConfig, *, batch: int, seq_len: int, ep: int = 1, factor: float = 0.0
) -> int:
    """Return the rows that go through a device's experts, empty slots included.

    Replicas send each other as many rows. `factor` is `parallel.ep_buffer_factor`.
    """
    tokens, copies = batch * seq_len, model.experts_per_token
    if model.capacity_factor:
        slots = math.ceil(model.capacity_factor * seq_len * copies / model.n_experts)
        return model.n_experts * batch * min(slots, seq_len)
    if ep == 1:
        return tokens * copies
    most = tokens * min(copies, model.n_experts // ep)
    return ep * (min(math.ceil(factor * tokens * copies / ep), most) if factor else most)


def sparse_layer_flops(
    model: LlamaConfig, *, batch: int, seq_len: int, remat: str = "none", ep: int = 1, tp: int = 1,
    factor: float = 0.0, over_tp: bool = False,
) -> OpFlops:  # fmt: skip
    """Return the matmul FLOPs of one sparse layer, with recomputation in B.

    Full recomputation repeats all of F except the last products of experts. Selective recomputation
    stores the results of ragged products, but not those of batched ones.
    """
    tokens, d, width = batch * seq_len, model.d_model, model.expert_width // tp
    each = tp if over_tp else 1  # devices between which the tokens of a sequence are divided
    rows = expert_rows(model, batch=batch, seq_len=seq_len // each, ep=ep, factor=factor)
    one = 2.0 * d * width * each * rows
    shared = 2.0 * d * width * tokens * model.shared_experts
    router = 2.0 * tokens / each * d * model.n_experts
    attention = layer_flops(
        replace(model, d_ff=0, n_experts=0), batch=batch, seq_len=seq_len, remat=remat, tp=tp
    )
    again = {
        "none": 0.0,
        "selective": 2 * one if model.capacity_factor else 0.0,
        "full": 2 * one + 2 * shared + router,
    }[remat]
    return attention + OpFlops.of_weight(3 * one + 3 * shared + router) + OpFlops(B=again)


def exchanged_bytes(
    model: LlamaConfig, *, batch: int, seq_len: int, itemsize: int, remat: str, ep: int,
    factor: float = 0.0,
) -> OpFlops:  # fmt: skip
    """Return the bytes that a device sends in F, B and W of one sparse layer to other devices.

    A row is sent with its weight and, without a capacity, with its expert; it comes back alone.
    B sends the gradients of both, and repeats F's messages if nothing is stored; W sends nothing.
    """
    rows = expert_rows(model, batch=batch, seq_len=seq_len, ep=ep, factor=factor)
    beside = 1 if model.capacity_factor else 2
    value = rows * itemsize * (ep - 1) / ep
    forth, back = value * (model.d_model + beside), value * model.d_model
    return OpFlops(F=forth + back, B=forth + back + forth * (remat == "full"))
