"""Cost of jaxpipe's decoder from sizes alone: FLOPs and stored bytes of F, B and W.

The layer is that of `jaxpipe.model`: RMSNorm, grouped-query attention with its own head width,
rotary positions and optional norms of q and k, SwiGLU. The bytes are those of the split into F, B
and W: residuals go from F to B (`for_b`) or to W (`for_w`), the W stash from B to W. Everything
is for one microbatch on one device.

Tensor parallelism shards heads and hidden values over `tp` (Shoeybi et al. 2019, section 3).
Sequence parallelism also shards the residual stream and the inputs of matrices along the
sequence; they are all-gathered when they are needed (Korthikanti et al. 2022, section 4.2.2).
Context parallelism gives each of `cp` devices a sequence shard; keys and values are stored where
they are computed, and all-gathered again, or go round a ring of groups of `heads` devices that
exchange heads. With sequences in `slices`, everything is for one slice, except that keys and
values are stored once for the whole sequence: `state_bytes`.

Letters: T tokens of a microbatch, D model, H query heads, G key/value heads, K head width, F
hidden width of the MLP, L tokens of a sequence.
"""

from dataclasses import dataclass

from jaxpipe.core.contract.parameter import TP, ParamSpec
from jaxpipe.core.contract.sequence import query_blocks
from jaxpipe.model.attention.blocks import count_halvings
from jaxpipe.model.families.llama.config import LlamaConfig
from oracles.flops import OpFlops

REMAT = ("none", "selective", "full")


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer and one microbatch; `until_b` is the papers' M_B, `until_w` their M_W."""

    for_b: int  # residuals that only B reads
    for_w: int  # residuals that W reads
    stash: int  # the W stash, which B leaves for W

    @property
    def until_b(self) -> int:
        """Bytes live from F until B."""
        return self.for_b + self.for_w

    @property
    def until_w(self) -> int:
        """Bytes live from B until W."""
        return self.for_w + self.stash


def layer_flops(
    model: LlamaConfig,
    *,
    batch: int,
    seq_len: int,
    remat: str = "none",
    tp: int = 1,
    cp: int = 1,
    heads: int = 0,
    slices: int = 1,
    causal: bool = False,
) -> OpFlops:
    """Return the matmul FLOPs of one layer on one device, with recomputation in B.

    Attention counts the pairs that are computed, masked ones too; `causal` counts only those that
    the mask lets through, on average over `cp` devices. `cudnn` computes the scores once more in
    B (Dao et al. 2022, Algorithm 4); that is taken from the algorithm, not measured.

    Raises `ValueError` for an unknown `remat`, a `tp` that does not divide heads and `d_ff`, or
    a `cp` x `slices` that does not divide `seq_len`.
    """
    widths = _Widths(model, tp)
    _check_remat(remat)
    tokens = batch * _window(seq_len, cp, slices)
    blocks = _in_blocks(model, cp, heads, slices)
    keys = _keys(model, seq_len, cp * slices)
    if causal:
        keys = _seen(model, seq_len)
    elif blocks:
        keys = _keys_of_blocks(seq_len, cp, heads, slices)
    pairs = tokens * keys
    down = 2.0 * tokens * model.d_model * widths.hidden
    weights = 2.0 * tokens * model.d_model * (2 * widths.q + 2 * widths.kv) + 3 * down
    product = 2.0 * pairs * widths.q  # scores, or scores @ v
    work = OpFlops.of_weight(weights) + OpFlops.of_values(2 * product)
    fused = model.attention == "cudnn" or blocks
    again = product if fused else 0.0
    if remat == "full":
        again += work.F - down
        if slices > 1:  # only norms need the keys' product: the state has keys and values
            again -= 2.0 * tokens * model.d_model * widths.kv * (2 - model.qk_norm)
    elif remat == "selective" and not fused:
        again += 2 * product
    return work + OpFlops(B=again)


def head_flops(
    model: LlamaConfig, *, batch: int, seq_len: int, tp: int = 1, cp: int = 1, slices: int = 1
) -> OpFlops:
    """Return the FLOPs of the product with the output head, on one device.

    Raises `ValueError` for a `tp` that does not divide `vocab_size`, or a `cp` x `slices` that
    does not divide `seq_len`.
    """
    tokens = batch * _window(seq_len, cp, slices)
    return OpFlops.of_weight(2.0 * tokens * _vocabulary_matrix(model, tp))


def layer_bytes(
    model: LlamaConfig,
    *,
    batch: int,
    seq_len: int,
    itemsize: int,
    remat: str = "none",
    tp: int = 1,
    cp: int = 1,
    heads: int = 0,
    slices: int = 1,
    sequence_parallel: bool = False,
) -> LayerBytes:
    """Return the bytes that one layer stores for one microbatch on one device.

    `itemsize` is the bytes of one value of the compute dtype. W needs the input and the output
    gradient of every matrix whatever `remat` is: the input is a residual where F stores it, and
    part of the W stash where B recomputes it.

    Raises `ValueError` for an unknown `remat`, a `tp` that does not divide heads and `d_ff`, or
    with sequence parallelism a device's tokens, or a `cp` x `slices` that does not divide
    `seq_len`.
    """
    widths = _Widths(model, tp)
    _check_remat(remat)
    blocks = _in_blocks(model, cp, heads, slices)
    fused = model.attention == "cudnn" or blocks
    own = _window(seq_len, cp, slices)
    tokens = batch * own
    rows = _stream_tokens(batch, own, tp, sequence_parallel)
    stream = rows * model.d_model * itemsize
    q, kv, hidden = (tokens * w * itemsize for w in (widths.q, widths.kv, widths.hidden))
    # With slices, keys and values as attention reads them are in the state; only norms then
    # need the keys as the weights produce them.
    made = 2 * kv if slices == 1 else kv * model.qk_norm
    inputs = 2 * stream + q + hidden  # of q, k and v; of gate and up; of out; of down
    gradients = 2 * stream + q + 2 * kv + 2 * hidden  # at the outputs of all seven
    # Attention that stores no scores has a second output: a float32 logsumexp per query.
    logsumexp = 4 * tokens * widths.heads if fused else 0
    # Sharded by heads, attention's output is stored by heads and, for W, by tokens; with fewer
    # key heads than devices each device has a copy of one; norms need queries and keys before.
    by_heads = heads > 1
    exchanged, copies = by_heads * q, max(heads // widths.kv_heads, 1)
    copied = by_heads * (copies - 1) * 2 * kv * (slices == 1)
    copied += by_heads * model.qk_norm * (q + kv * (slices == 1) * copies)
    match remat:
        case "full":
            return LayerBytes(stream, 0, inputs + gradients)
        case "selective":
            products = q + made + stream + 2 * hidden
            # The attention's output is stored only if it is fused.
            for_w = q if fused and not by_heads else 0
            for_b = stream + products + logsumexp + exchanged
            return LayerBytes(for_b, for_w, inputs - for_w + gradients)
    wide = max(itemsize, 4)
    # float32: two numbers a row of every norm, and the exponentials and sum of the softmax.
    norms = 2 * rows + tokens * (widths.heads + widths.kv_heads) * model.qk_norm
    parts, keys = _blocks(model, seq_len, cp * slices), _keys(model, seq_len, cp * slices)
    if not fused and parts[-1] != (0, seq_len):  # no block reads all keys: each stores its own
        made = int(made * keys * len(parts) / seq_len)
    softmax = logsumexp or int(tokens * widths.heads * wide * (keys + 1))
    for_b = 2 * stream + q + made + 2 * hidden + 2 * norms * wide + softmax + exchanged + copied
    return LayerBytes(for_b, q, inputs - q + gradients)


def state_bytes(
    model: LlamaConfig, *, batch: int, seq_len: int, itemsize: int, tp: int = 1, cp: int = 1,
    heads: int = 0,
) -> int:  # fmt: skip
    """Return the bytes of a layer's keys and values of whole sequences, equal to their gradient's.

    Each of `heads` devices has a share of the heads, for the tokens of its whole group in the ring.
    """
    keys = max(_Widths(model, tp).kv_heads // max(heads, 1), 1)
    tokens = seq_len * heads // cp if heads else seq_len
    return 2 * batch * tokens * keys * model.head_size * itemsize


def hidden_bytes(
    model: LlamaConfig,
    *,
    batch: int,
    seq_len: int,
    itemsize: int,
    tp: int = 1,
    cp: int = 1,
    slices: int = 1,
    sequence_parallel: bool = False,
) -> int:
    """Return the bytes of one activation, or its gradient, that a device sends to another stage.

    Raises `ValueError` for a `cp` x `slices` that does not divide `seq_len`, or a `tp` that does
    not divide the rest with sequence parallelism.

    >>> model = LlamaConfig(
    ...     n_layers=1, d_model=8, n_heads=2, n_kv_heads=1, d_ff=16, vocab_size=32
    ... )
    >>> hidden_bytes(model, batch=1, seq_len=4, itemsize=2)
    64
    """
    own = _window(seq_len, cp, slices)
    return _stream_tokens(batch, own, tp, sequence_parallel) * model.d_model * itemsize


def layer_leaves(model: LlamaConfig, tp: int = 1) -> dict[str, ParamSpec]:
    """Return the full shape of every parameter of a layer, and its sharding over `tp` devices.

    Key and value weights are replicated where there are fewer heads than devices.
    """
    d, f, k = model.d_model, model.d_ff, model.head_size
    q, kv = model.n_heads * k, model.n_kv_heads * k
    cut_kv = _matrix(d, kv, 1) if model.n_kv_heads % tp == 0 else _matrix(d, kv, None)
    norms = {"attn_norm": d, "mlp_norm": d}
    if model.qk_norm:
        norms |= {"attn/q_norm": k, "attn/k_norm": k}
    return {
        "attn/wq": _matrix(d, q, 1),
        "attn/wk": cut_kv,
        "attn/wv": cut_kv,
        "attn/wo": _matrix(q, d, 0),
        "mlp/w_gate": _matrix(d, f, 1),
        "mlp/w_up": _matrix(d, f, 1),
        "mlp/w_down": _matrix(f, d, 0),
        **{f"{name}/scale": ParamSpec(shape=(size,)) for name, size in norms.items()},
    }


def end_leaves(model: LlamaConfig, axes: tuple[str, ...] = (TP,)) -> dict[str, ParamSpec]:
    """Return full shapes of embedding, final norm and head, and their sharding over `axes`."""
    d, v = model.d_model, model.vocab_size
    leaves = {"embed": _matrix(v, d, 0, axes), "final_norm/scale": ParamSpec(shape=(d,))}
    return leaves if model.tie_embeddings else leaves | {"head": _matrix(d, v, 1, axes)}


def _matrix(rows: int, columns: int, cut: int | None, axes: tuple[str, ...] = (TP,)) -> ParamSpec:
    cuts = () if cut is None else tuple((axis, cut) for axis in axes)
    return ParamSpec(sharded=cuts, shape=(rows, columns), matrix=(0, 1))


class _Widths:
    """Widths of a device's shard of a layer."""

    def __init__(self, model: LlamaConfig, tp: int):
        for name in ("n_heads", "d_ff"):
            _check_divides(tp, name, getattr(model, name))
        self.heads, self.kv_heads = model.n_heads // tp, max(model.n_kv_heads // tp, 1)
        self.q, self.kv = self.heads * model.head_size, self.kv_heads * model.head_size
        self.hidden = model.d_ff // tp


def _window(seq_len: int, cp: int, slices: int) -> int:
    """Return the tokens that one device has of a sequence slice."""
    _check_divides(cp * slices, "seq_len", seq_len, by="cp x slices")
    return seq_len // (cp * slices)


def _keys(model: LlamaConfig, seq_len: int, parts: int) -> float:
    """Return the keys per query whose scores are computed on average, masked ones too."""
    blocks = _blocks(model, seq_len, parts)
    return sum(end - first for first, end in blocks) / len(blocks)


def _in_blocks(model: LlamaConfig, cp: int, heads: int, slices: int) -> bool:
    """Return whether attention runs block by block, without stored scores; cuDNN's runs in tiles.

    cuDNN's kernel computes masked blocks too with all-gathered shards, or a window with slices.
    """
    gathered = cp > 1 and not heads
    if model.attention == "cudnn":
        return not gathered and not (slices > 1 and model.sliding_window)
    return slices > 1 or (cp > 1 and not gathered)


def _keys_of_blocks(seq_len: int, cp: int, heads: int, slices: int) -> float:
    """Return the keys per query whose scores are computed on average if later blocks are skipped.

    Of a device's tokens of a slice, n halvings leave 1 + 2^-n of the causal half, for some heads;
    of other slices half are read, and of other devices' tokens in a ring all or none. All-gathered
    keys are not halved. Tiles of 128 count the same, since no block has fewer tokens.
    """
    of_slice = seq_len // slices
    others = (slices - 1) / 2 * of_slice
    if not heads and cp > 1:
        return of_slice + others
    own = of_slice // (cp // heads) if heads else of_slice
    others += (of_slice - own) / 2
    return own * (1 + 0.5 ** count_halvings(own)) / 2 + others


def _blocks(model: LlamaConfig, seq_len: int, parts: int) -> list[tuple[int, int]]:
    """Return the range of keys of every block of queries: its first window to its last query."""
    if model.attention == "cudnn" or parts > 1:
        return [(0, seq_len)]
    rows, window = seq_len // query_blocks(seq_len), model.sliding_window or seq_len
    return [(max(i - window + 1, 0), i + rows) for i in range(0, seq_len, rows)]


def _seen(model: LlamaConfig, seq_len: int) -> float:
    """Return the keys per query that the mask lets through on average."""
    window = model.sliding_window or seq_len
    return sum(min(query + 1, window) for query in range(seq_len)) / seq_len


def _stream_tokens(batch: int, own: int, tp: int, sequence_parallel: bool) -> int:
    """Return the tokens of a device's residual stream; it has `own` tokens of a sequence."""
    if not sequence_parallel:
        return batch * own
    _check_divides(tp, "seq_len", own)
    return batch * (own // tp)


def _vocabulary_matrix(model: LlamaConfig, tp: int) -> int:
    _check_divides(tp, "vocab_size", model.vocab_size)
    return model.vocab_size // tp * model.d_model


def _check_divides(parts: int, name: str, size: int, by: str = "tp") -> None:
    if size % parts:
        raise ValueError(f"{by}={parts} must divide {name}={size}: devices hold equal parts.")


def _check_remat(remat: str) -> None:
    if remat not in REMAT:
        raise ValueError(f"unknown remat={remat!r}: use one of {', '.join(REMAT)}.")
