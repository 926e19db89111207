"""What jaxpipe's own decoder costs: FLOPs and stored bytes of F, B and W, from sizes alone.

The layer is the one of `jaxpipe.model`: RMSNorm, grouped-query attention with heads of their own
width, rotary positions and optional norms of q and k, SwiGLU. The bytes are those of the cut into
F, B and W: residuals go from F to B (`for_b`) or to W (`for_w`), the stash from B to W. Everything
is for one microbatch on one device.

Tensor parallelism splits heads and hidden values by `tp` (Shoeybi et al. 2019, section 3); sequence
parallelism splits the stream between them along the sequence, the matrices' inputs included, which
are gathered again when they are needed (Korthikanti et al. 2022, section 4.2.2). Context
parallelism gives each of `cp` devices a stretch of every sequence; keys and values are stored
where they are made, and gathered again, or go round groups of `heads` devices that exchange heads.
Of sequences cut into `slices` in time, everything is for one slice, except that all keys and values
are held once a sequence: `state_bytes`.

Letters: T tokens of a microbatch, D model, H query heads, G key/value heads, K head width, F
hidden width of the MLP, L tokens of a sequence.
"""

from dataclasses import dataclass

from jaxpipe.model.blocks import halvings
from jaxpipe.model.llama.config import LlamaConfig
from jaxpipe.partition.leaf import TP, Leaf
from jaxpipe.partition.sequence import query_blocks
from oracles.flops import OpFlops

REMAT = ("none", "selective", "full")


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer and one microbatch: the papers' M_B is `until_b`, M_W is `until_w`."""

    for_b: int  # residuals that only B reads
    for_w: int  # residuals that W reads
    stash: int  # what B leaves for W

    @property
    def until_b(self) -> int:
        """Held from F until B."""
        return self.for_b + self.for_w

    @property
    def until_w(self) -> int:
        """Held from B until W."""
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
    """FLOPs of the matrix products of one layer, on one device, with what B computes again.

    Attention counts the pairs that are computed, masked ones too; `causal` counts only those that
    the mask lets through, on the average of `cp` devices. `cudnn` computes the scores once more in
    B (Dao et al. 2022, Algorithm 4); that is taken from the algorithm, not measured.

    Raises `ValueError` for an unknown `remat`, a `tp` that does not divide heads and `d_ff`, or
    a `cp` x `slices` that does not divide `seq_len`.
    """
    widths = _Widths(model, tp)
    _check_remat(remat)
    tokens = batch * _stretch(seq_len, cp, slices)
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
        if slices > 1:  # keys and values are in the state; only norms need the keys' product
            again -= 2.0 * tokens * model.d_model * widths.kv * (2 - model.qk_norm)
    elif remat == "selective" and not fused:
        again += 2 * product
    return work + OpFlops(B=again)


def head_flops(
    model: LlamaConfig, *, batch: int, seq_len: int, tp: int = 1, cp: int = 1, slices: int = 1
) -> OpFlops:
    """FLOPs of the product with the output head, on one device.

    Raises `ValueError` for a `tp` that does not divide `vocab_size`, or a `cp` x `slices` that
    does not divide `seq_len`.
    """
    tokens = batch * _stretch(seq_len, cp, slices)
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
    """Bytes that one layer stores for one microbatch on one device.

    `itemsize` is the bytes of one value of the compute dtype. W needs the input and the output
    gradient of every matrix whatever `remat` is: the input is a residual where F stores it, and
    part of the stash where B computes it again.

    Raises `ValueError` for an unknown `remat`, a `tp` that does not divide heads and `d_ff`, or
    with sequence parallelism a device's tokens, or a `cp` x `slices` that does not divide
    `seq_len`.
    """
    widths = _Widths(model, tp)
    _check_remat(remat)
    blocks = _in_blocks(model, cp, heads, slices)
    fused = model.attention == "cudnn" or blocks
    own = _stretch(seq_len, cp, slices)
    tokens = batch * own
    rows = _stream_tokens(batch, own, tp, sequence_parallel)
    stream = rows * model.d_model * itemsize
    q, kv, hidden = (tokens * w * itemsize for w in (widths.q, widths.kv, widths.hidden))
    # Keys and values as attention reads them are in the state of slices, as the weights make them
    # only norms need the keys.
    made = 2 * kv if slices == 1 else kv * model.qk_norm
    inputs = 2 * stream + q + hidden  # of q, k and v; of gate and up; of out; of down
    gradients = 2 * stream + q + 2 * kv + 2 * hidden  # at the outputs of all seven
    # The second output of attention that stores no scores: a wide logsumexp a query.
    logsumexp = 4 * tokens * widths.heads if fused else 0
    # What attention gives by heads, beside the same by tokens, which W reads; keys of fewer heads
    # than devices, of which each has one; queries and keys before their norms.
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
    # Two numbers a row of every norm, and of the softmax exponentials and their sum, all wide.
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
    """Bytes of a layer's keys and values of whole sequences; the gradient at them has as many.

    Of `heads` devices each has a share of the heads, of the tokens that they have in a ring.
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
    """Bytes of one activation, or of its gradient, as a device sends it to another stage.

    Raises `ValueError` for a `cp` x `slices` that does not divide `seq_len`, or a `tp` that does
    not divide the rest with sequence parallelism.

    >>> model = LlamaConfig(
    ...     n_layers=1, d_model=8, n_heads=2, n_kv_heads=1, d_ff=16, vocab_size=32
    ... )
    >>> hidden_bytes(model, batch=1, seq_len=4, itemsize=2)
    64
    """
    own = _stretch(seq_len, cp, slices)
    return _stream_tokens(batch, own, tp, sequence_parallel) * model.d_model * itemsize


def layer_leaves(model: LlamaConfig, tp: int = 1) -> dict[str, Leaf]:
    """Whole shape of every parameter of a layer, and how `tp` devices share it.

    Key and value weights of fewer heads than devices are on all of them.
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
        **{f"{name}/scale": Leaf(shape=(size,)) for name, size in norms.items()},
    }


def end_leaves(model: LlamaConfig, axes: tuple[str, ...] = (TP,)) -> dict[str, Leaf]:
    """Whole shape of the parameters that no layer has, and how devices along `axes` share them."""
    d, v = model.d_model, model.vocab_size
    leaves = {"embed": _matrix(v, d, 0, axes), "final_norm/scale": Leaf(shape=(d,))}
    return leaves if model.tie_embeddings else leaves | {"head": _matrix(d, v, 1, axes)}


def _matrix(rows: int, columns: int, cut: int | None, axes: tuple[str, ...] = (TP,)) -> Leaf:
    cuts = () if cut is None else tuple((axis, cut) for axis in axes)
    return Leaf(cuts=cuts, shape=(rows, columns), matrix=(0, 1))


class _Widths:
    """Widths of what one device holds of a layer."""

    def __init__(self, model: LlamaConfig, tp: int):
        for name in ("n_heads", "d_ff"):
            _check_divides(tp, name, getattr(model, name))
        self.heads, self.kv_heads = model.n_heads // tp, max(model.n_kv_heads // tp, 1)
        self.q, self.kv = self.heads * model.head_size, self.kv_heads * model.head_size
        self.hidden = model.d_ff // tp


def _stretch(seq_len: int, cp: int, slices: int) -> int:
    """Tokens of a sequence's slice that one of the devices sharing it has."""
    _check_divides(cp * slices, "seq_len", seq_len, by="cp x slices")
    return seq_len // (cp * slices)


def _keys(model: LlamaConfig, seq_len: int, parts: int) -> float:
    """Keys whose scores a query has on average, masked ones too, of sequences in so many parts."""
    blocks = _blocks(model, seq_len, parts)
    return sum(end - first for first, end in blocks) / len(blocks)


def _in_blocks(model: LlamaConfig, cp: int, heads: int, slices: int) -> bool:
    """Whether attention is made block by block, of which nothing is stored; cuDNN's in tiles.

    cuDNN's makes all that it masks: of stretches that are gathered, and of windows over slices.
    """
    gathered = cp > 1 and not heads
    if model.attention == "cudnn":
        return not gathered and not (slices > 1 and model.sliding_window)
    return slices > 1 or (cp > 1 and not gathered)


def _keys_of_blocks(seq_len: int, cp: int, heads: int, slices: int) -> float:
    """Keys whose scores a query has on average where later blocks are left out.

    n halvings make 1 + 2^-n of the causal half of the tokens that a device has of a slice, for some
    heads; of half of the other slices, or of the tokens of others in a ring, all or none. A gather
    has no halves. Tiles of 128 are as many, for no block is of fewer tokens.
    """
    of_slice = seq_len // slices
    others = (slices - 1) / 2 * of_slice
    if not heads and cp > 1:
        return of_slice + others
    own = of_slice // (cp // heads) if heads else of_slice
    others += (of_slice - own) / 2
    return own * (1 + 0.5 ** halvings(own)) / 2 + others


def _blocks(model: LlamaConfig, seq_len: int, parts: int) -> list[tuple[int, int]]:
    """The keys that every block of queries reads: the first one's window up to its last one's."""
    if model.attention == "cudnn" or parts > 1:
        return [(0, seq_len)]
    rows, window = seq_len // query_blocks(seq_len), model.sliding_window or seq_len
    return [(max(i - window + 1, 0), i + rows) for i in range(0, seq_len, rows)]


def _seen(model: LlamaConfig, seq_len: int) -> float:
    """Keys that the mask lets through to a query on average."""
    window = model.sliding_window or seq_len
    return sum(min(query + 1, window) for query in range(seq_len)) / seq_len


def _stream_tokens(batch: int, own: int, tp: int, sequence_parallel: bool) -> int:
    """Tokens whose residual stream is on one device, which has `own` of a sequence."""
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
