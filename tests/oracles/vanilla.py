"""Cost of one layer of a GPT-like transformer, counted as zero-bubble papers do.

The layer: h wide, a heads of width h / a, an MLP of width 4h with GeLU, LayerNorm before each
block, dropout after each block and on the attention's probabilities. Activations and gradients are
16 bit, dropout masks 8 bit.

Sources: Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2.3 and Table 1 (FLOPs, and
which activations W needs); Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models", sections 4.1 and 4.2 (bytes item by item, tensor and sequence parallelism).
"""

from dataclasses import dataclass

from oracles.flops import OpFlops


@dataclass(frozen=True)
class VanillaSizes:
    """One microbatch of one layer, under the letters of the papers.

    Raises `ValueError` unless `t` divides `s`, `h` and `a`.
    """

    s: int  # tokens of a sequence
    b: int  # sequences of a microbatch
    h: int  # width of the model
    a: int  # heads
    t: int = 1  # tensor-parallel devices

    def __post_init__(self):
        for name, size in (("s", self.s), ("h", self.h), ("a", self.a)):
            if size % self.t:
                raise ValueError(f"t={self.t} must divide {name}={size}: devices hold equal parts.")


@dataclass(frozen=True)
class ActivationBytes:
    """Live bytes of one microbatch on a device: M_B from F until B, M_W from B until W.

    Values that W needs are counted at the size of the activations; gradients that B leaves for W
    replace activations that B no longer needs. They add up: `sum(parts, ActivationBytes())`.
    """

    until_b: int = 0
    until_w: int = 0

    def __add__(self, other: "ActivationBytes") -> "ActivationBytes":
        return ActivationBytes(self.until_b + other.until_b, self.until_w + other.until_w)


def vanilla_flops(sizes: VanillaSizes) -> dict[str, OpFlops]:
    """Return the FLOPs of each matrix product of a layer per device, with full-square attention.

    The sum is F = sbh(24h + 4s), B = sbh(24h + 8s), W = 24 sbh² on one device (Table 1).

    >>> sum(vanilla_flops(VanillaSizes(s=2, b=1, h=4, a=2)).values(), OpFlops())
    OpFlops(F=832.0, B=896.0, W=768.0)
    """
    weight = 2 * sizes.s * sizes.b * sizes.h**2 / sizes.t
    square = 2 * sizes.s**2 * sizes.b * sizes.h / sizes.t
    return {
        "qkv": OpFlops.of_weight(3 * weight),
        "scores": OpFlops.of_values(square),
        "scores @ v": OpFlops.of_values(square),
        "out": OpFlops.of_weight(weight),
        "up": OpFlops.of_weight(4 * weight),
        "down": OpFlops.of_weight(4 * weight),
    }


def vanilla_bytes(
    sizes: VanillaSizes,
    *,
    sequence_parallel: bool = False,
    flash: bool = False,
    dropout: bool = True,
) -> dict[str, ActivationBytes]:
    """Return the bytes of each activation of a layer, per device.

    On one device the sum is `sb(34h + 5as)` until B and `32 sbh` until W. With `t` devices heads
    and the MLP's hidden values are sharded; `sequence_parallel` shards the others along the
    sequence too. `flash` stores neither the probabilities nor values computed from them (the
    logsumexp that it stores instead, one number a query, is not counted). Without `dropout` there
    are no masks, and the softmax output itself multiplies `v`.

    >>> items = vanilla_bytes(VanillaSizes(s=2, b=1, h=4, a=2))
    >>> sum(items.values(), ActivationBytes())
    ActivationBytes(until_b=312, until_w=256)
    """
    stream = sizes.s * sizes.b * sizes.h // (sizes.t if sequence_parallel else 1)
    split = sizes.s * sizes.b * sizes.h // sizes.t
    square = sizes.a * sizes.s**2 * sizes.b // sizes.t
    for_both = {
        "layer norm 1 input": 2 * stream,
        "qkv input": 2 * stream,
        "q and k": 4 * split,
        "v": 2 * split,
        "out input": 2 * split,
        "layer norm 2 input": 2 * stream,
        "up input": 2 * stream,
        "gelu input": 8 * split,
        "down input": 8 * split,
    }
    for_b_alone = {}
    if not flash:
        for_b_alone["softmax output"] = 2 * square
    if dropout and not flash:
        for_b_alone |= {"softmax dropout mask": square, "softmax dropout output": 2 * square}
    if dropout:
        for_b_alone |= {"attention dropout mask": stream, "mlp dropout mask": stream}
    return {name: ActivationBytes(size, size) for name, size in for_both.items()} | {
        name: ActivationBytes(size, 0) for name, size in for_b_alone.items()
    }
