"""What a layer with experts costs: FLOPs of its products, bytes that it sends to other replicas.

The layer is the one of `jaxpipe.model.moe`: attention as in `oracles.decoder`, a router, routed
SwiGLU experts, shared ones. Everything is for one microbatch on one device of `ep`, which have
parts of the experts each, and of `tp`, which have parts of every expert's width.

Without a capacity every choice of a token is a row; with one every expert has slots for each
sequence, full or not (Fedus et al. 2021, equation 3). Over ep a device has buffers for rows from
every other one, of which all are multiplied.
"""

import math

from msgspec.structs import replace

from jaxpipe.model.llama.config import LlamaConfig
from oracles.decoder import layer_flops
from oracles.flops import OpFlops


def expert_rows(
    model: LlamaConfig, *, batch: int, seq_len: int, ep: int = 1, factor: float = 0.0
) -> int:
    """Rows that go through a device's experts, empty slots included.

    Those that replicas send each other are as many: `factor` is `parallel.ep_buffer_factor`.
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
    factor: float = 0.0,
) -> OpFlops:  # fmt: skip
    """FLOPs of the matrix products of one sparse layer, with what B computes again.

    Full recomputation makes all of F again but the last products of experts. Selective
    recomputation stores what products of groups of rows make, and what batched ones make not.
    """
    tokens, d, width = batch * seq_len, model.d_model, model.expert_width // tp
    rows = expert_rows(model, batch=batch, seq_len=seq_len, ep=ep, factor=factor)
    one = 2.0 * d * width * rows
    shared = 2.0 * d * width * tokens * model.shared_experts
    router = 2.0 * tokens * d * model.n_experts
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
    """Bytes that a device sends in F, B and W of one sparse layer; its own part stays with it.

    A row goes with its weight, and where nothing tells its expert with that, and comes back alone.
    B sends the gradients of both, and again what F sent if that is not stored; W sends nothing.
    """
    rows = expert_rows(model, batch=batch, seq_len=seq_len, ep=ep, factor=factor)
    beside = 1 if model.capacity_factor else 2
    value = rows * itemsize * (ep - 1) / ep
    forth, back = value * (model.d_model + beside), value * model.d_model
    return OpFlops(F=forth + back, B=forth + back + forth * (remat != "none"))
