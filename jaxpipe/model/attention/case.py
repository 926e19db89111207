"""What attention asks of a kernel, and which cases the kernels support.

Configurations are checked by the same functions that kernels are chosen by, so this does not import
jax. A case that is not supported has a sentence that says why, and what to set instead.
"""

from collections.abc import Callable
from typing import NamedTuple

from jaxpipe.core.contract.sequence import FULL_SEQUENCE, FullSequence


class AttentionCase(NamedTuple):
    """What attention asks of a kernel; what is not known has the value that every kernel supports.

    Attributes:
      sequence: how queries reach keys on other devices.
      slices: whether they also attend to keys of earlier slices.
      window: number of last tokens that a query attends to; 0: all.
      chunk: tokens of a chunk of a document, within which a query attends; 0: all.
      documents: most documents in a packed row, where a query attends to its own document alone;
        0: a row is one text.
      has_sinks: whether heads have attention sinks.
      dropout: rate of dropped probabilities.
      rows: rows that a device computes at once, and tokens per row; 0: not known.
      heads: query heads of a device; 0: not known.
      width: of a query or key head; 0: not known.
      dtype: of queries, keys and values; "": not known.
      platform: `jax.Device.platform`; "": not known.
      capability: compute capability of GPUs; None: not known.
      deterministic: whether results must be equal bit by bit when they are computed again.
    """

    sequence: FullSequence = FULL_SEQUENCE
    slices: bool = False
    window: int = 0
    chunk: int = 0
    documents: int = 0
    has_sinks: bool = False
    dropout: float = 0.0
    rows: tuple[int, int] = (0, 0)
    heads: int = 0
    width: int = 0
    dtype: str = ""
    platform: str = ""
    capability: float | None = None
    deterministic: bool = False

    @property
    def gathers(self) -> bool:
        """Whether queries attend to keys that are all-gathered from the other devices."""
        return self.sequence.size > 1 and not self.sequence.heads


def xla_supports(case: AttentionCase) -> str | None:
    """None, or a sentence that says why plain matrix products do not compute the case.

    `model.attention_dropout` needs `parallel.cp_method='gather'`, if `parallel.cp` is above 1.
    """
    if case.dropout and case.sequence.heads and case.sequence.size > 1:
        return (
            f"model.attention_dropout={case.dropout} with replicas that share a sequence: shares "
            f"that may be dropped are kept with gathered keys alone; set "
            f"parallel.cp_method=gather, or model.attention_dropout=0."
        )
    return None


def indexed_supports(case: AttentionCase) -> str | None:
    """None, or a sentence that says why attention to chosen keys does not compute the case.

    `model.index_topk` needs `parallel.cp_method='gather'`, if `parallel.cp` is above 1, and
    excludes `model.attention_dropout`.
    """
    if case.sequence.heads and case.sequence.size > 1:
        return (
            "model.index_topk chooses among all keys of a sequence, which do not go round a ring "
            "and have no heads to exchange: set parallel.cp_method=gather."
        )
    if case.dropout:
        return (
            f"model.attention_dropout={case.dropout} drops probabilities, which the indexer "
            f"of model.index_topk learns: set model.attention_dropout=0."
        )
    return None


def cudnn_supports(case: AttentionCase) -> str | None:
    """None, or a sentence that says why cuDNN's kernel does not compute the case.

    `model.attention='cudnn'` needs an NVIDIA GPU and cuDNN, and excludes `train.deterministic`,
    `model.attention_dropout` and `model.attention_chunk`.

    `parallel.cp_method='ring'` with `model.attention='cudnn'` excludes `data.packing` and a
    sliding window.

    `parallel.cp_method='gather'` excludes attention sinks with `model.attention='cudnn'`.

    `parallel.slices` above 1 excludes attention sinks and a window with `model.attention='cudnn'`.

    `data.packing` with `model.attention='cudnn'` needs GPUs of compute capability 9.0 or later.
    """
    if case.dropout:
        return (
            f"model.attention_dropout={case.dropout} drops shares that the kernel of "
            f"model.attention='cudnn' keeps to itself: set model.attention=xla, or "
            f"model.attention_dropout=0."
        )
    if case.chunk:
        return (
            f"model.attention_chunk={case.chunk} masks keys that the kernel of "
            f"model.attention='cudnn' does not: set model.attention=xla, or, where no sequence is "
            f"longer than a chunk, model.attention_chunk=0."
        )
    return _unmet_masks(case) or _unmet_by_device(case)


def _unmet_masks(case: AttentionCase) -> str | None:
    """A sentence if the case needs a mask where cuDNN's kernel has none."""
    if case.sequence.ring > 1 and (case.documents or case.window):
        what = "data.packing" if case.documents else f"a window of {case.window} tokens"
        return (
            f"parallel.cp_method='ring' and model.attention='cudnn' with {what}: of keys that go "
            f"round the kernel takes all or none; set model.attention=xla, or "
            f"parallel.cp_method=ulysses."
        )
    if case.has_sinks and case.gathers:
        return (
            "parallel.cp_method='gather' masks keys, and cuDNN's kernel has no log-sum-exp for the "
            "attention sinks of this model.family there: set parallel.cp_method=ulysses, or "
            "model.attention=xla."
        )
    if case.has_sinks and case.slices and case.window:
        return (
            f"parallel.slices with model.sliding_window={case.window} masks keys, and cuDNN's "
            f"kernel has no log-sum-exp for the attention sinks of this model.family there: set "
            f"model.attention=xla, or parallel.slices=1 and parallel.overlap_halves=false."
        )
    return None


def _unmet_by_device(case: AttentionCase) -> str | None:
    """A sentence if cuDNN has no kernel for the devices, or for shape and dtype on them."""
    if case.platform not in ("", "gpu", "cuda"):
        return (
            f"model.attention='cudnn' needs an NVIDIA GPU and cuDNN, which jax finds together, but "
            f"the devices are of the platform {case.platform!r}: set model.attention=xla."
        )
    if case.documents and case.capability is not None and case.capability < 9:
        return (
            f"data.packing with model.attention='cudnn' needs GPUs of compute capability 9.0 "
            f"(Hopper) or later, but these have {case.capability}: set model.attention=xla."
        )
    if case.deterministic:
        return (
            "train.deterministic=true with model.attention='cudnn': XLA ends such a step with an "
            "error of its own (an H100, jax 0.11.2, cuDNN 9.19); set model.attention=xla, or leave "
            "train.deterministic out."
        )
    if not case.dtype:
        return None
    if case.documents:
        return cudnn_takes_packed((*case.rows, case.heads, case.width), case.dtype)
    return cudnn_takes(case.width, case.dtype)


def cudnn_takes(width: int, dtype: str) -> str | None:
    """None, or a sentence if cuDNN's kernel does not support heads of this width and dtype.

    `model.attention='cudnn'` needs `train.compute_dtype` bfloat16 or float16, and a width of heads
    that is a multiple of 8 up to 256.
    """
    if dtype in ("bfloat16", "float16") and width % 8 == 0 and width <= 256:
        return None
    return (
        f"attention of cuDNN takes bfloat16 or float16, and heads whose width is a multiple of 8 "
        f"up to 256, but these are {dtype} of width {width}: change train.compute_dtype or the "
        f"heads, or set model.attention=xla."
    )


def cudnn_takes_packed(shape: tuple[int, int, int, int], dtype: str) -> str | None:
    """None, or a sentence if cuDNN's packed form does not support queries `[B, S, H, K]`.

    `train.microbatch_size` x `train.seq_len` x heads of a device x their width must be less than
    2^31, with `data.packing` and `model.attention='cudnn'`.
    """
    rows, tokens, heads, width = shape
    if (unmet := cudnn_takes(width, dtype)) or rows * tokens * heads * width < 2**31:
        return unmet
    return (
        f"attention of cuDNN within documents counts elements in int32, but {rows} rows of "
        f"{tokens} tokens with {heads} heads of {width} are 2^31 or more: lower "
        f"train.microbatch_size, or set model.attention=xla."
    )


# By `model.attention`: None, or the sentence that says why the kernel does not compute a case.
SUPPORTS: dict[str, Callable[[AttentionCase], str | None]] = {
    "xla": xla_supports,
    "cudnn": cudnn_supports,
}
