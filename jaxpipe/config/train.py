"""`[train]`: the size of a step, the number of steps, precision and memory."""

from typing import Annotated, Literal

from msgspec import Meta

from jaxpipe.config.path_types import LocalPath
from jaxpipe.config.rules import (
    CUSTOM,
    at_most,
    excludes,
    multiple_of,
    needs,
    needs_package,
    read_with,
)
from jaxpipe.config.watching import Section
from jaxpipe.model.family import INT32_MAX, Count, Positive

Seed = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Temperature = Annotated[float, Meta(ge=1e-6, le=1e6)]
LossRow = Annotated[str, Meta(pattern=r"^[A-Za-z_]\w*(\[[1-9]\d{0,5}\])?$")]

_OF_ROWS = "it is computed from the log-probabilities of whole rows alone"
_BETWEEN = "a program runs that many steps, and the state exists only between two programs"


class TrainConfig(Section, frozen=True, kw_only=True):
    """`[train]`: the size of a step, the number of steps, precision and memory."""

    steps: Positive  # updates in the whole run
    # steps in one program: a pipeline rank updates its stages and starts the next step while others
    # still drain
    fused_steps: Annotated[
        Positive,
        excludes("train.variable_length", why="steps of one program have rows of one length"),
        excludes("train.offload_moments", why="ranks update in the midst of others' work"),
        excludes("train.corruption_check_every", why="its check computes a single step again"),
    ] = 1
    grad_accum_steps: Count = 0  # microbatches per step (M); 0: derived from batch_tokens
    batch_tokens: Count = 0  # tokens per step over all devices; 0: derived from grad_accum_steps
    microbatch_size: Positive  # sequences (with cp, sequence shards) per microbatch and replica
    seq_len: Annotated[  # tokens in a sequence
        int,
        Meta(ge=2, le=INT32_MAX),
        at_most("model.max_seq_len", why="the longest sequence that the model is made for"),
    ]
    # rows hold whole documents of up to seq_len tokens, and a step pads to its longest row
    variable_length: bool = False
    # variable lengths [tokens] are rounded up to a multiple; every new length compiles again; 0:
    # only pad_to_multiple_of
    length_bucket: Annotated[Count, read_with("train.variable_length")] = 1024
    # variable lengths: tokens per device are a multiple of it
    pad_to_multiple_of: Annotated[Positive, read_with("train.variable_length")] = 128
    seed: Seed = 0  # seed of initial values and data order
    # dtype of matrix products and activations; parameters and sums stay float32
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    # layers multiply in 8-bit floats, scaled by the maximum of each operand (current) or of the
    # last steps (delayed)
    fp8: Annotated[
        Literal["none", "current", "delayed"],
        needs("train.compute_dtype", "bfloat16", why="values between 8-bit products are bfloat16"),
    ] = "none"
    # number of steps whose maxima scale an operand
    fp8_history: Annotated[int, Meta(ge=1, le=2**16), read_with("train.fp8", "delayed")] = 1024
    # what B recomputes: nothing, all but matrix products and attention, or everything. "ahead" is
    # "full" in ticks in which a pipeline rank would wait for B; for this it stores what "selective"
    # does, of one microbatch
    remat: Annotated[
        Literal["none", "selective", "full", "ahead"],
        excludes(
            "parallel.slices",
            above=1,
            when="ahead",
            why="a slice would be computed with the state of later ones",
        ),
        excludes("train.offload_layers", when="ahead", why="recomputed residuals are read soon"),
    ] = "none"
    # first layers of every stage of which B recomputes everything, whatever remat says. Each saves
    # the memory of its residuals and costs another forward of the layer; all layers: remat="full"
    remat_layers: Annotated[
        Count,
        excludes("train.remat", "full", "ahead", why="these recompute all layers"),
        excludes("train.offload_layers", why="both are for the first layers of every stage"),
    ] = 0
    offload_layers: Count = 0  # first layers of every stage whose residuals are kept on the host
    offload_moments: bool = False  # keep the optimizer's moments on the host between updates
    deterministic: bool = False  # bitwise equal results on the same devices; costs time on GPUs
    # consecutive non-finite steps to skip before the run stops; 0: stop at the first. With float16
    # a value above 0 turns on dynamic loss scaling
    skip_non_finite: Count = 0
    # skip steps whose loss or gradient norm is above the mean of the last accepted steps by more
    # than this number of standard deviations; 0: off, 6 is usual. Costs nothing
    spike_sigma: Annotated[float, Meta(ge=0)] = 0.0
    # number of newest accepted steps that give mean and standard deviation; no step is a spike
    # before half as many have been accepted
    spike_window: Annotated[int, Meta(ge=2, le=2**16), read_with("train.spike_sigma")] = 128
    # most consecutive steps to skip, counted from a spike on; at one more the run rolls back or
    # stops
    spike_limit: Annotated[Count, read_with("train.spike_sigma")] = 8
    # most rollbacks of a run to the checkpoint before a series of spikes; each continues with the
    # data after the series; 0: the run stops instead. Needs checkpoint.every
    spike_rollbacks: Annotated[Count, read_with("train.spike_sigma")] = 0
    # steps between checks for devices that compute wrong numbers: forward and backward run twice
    # more, once with the devices in another order, and all bits are compared; 0: never. Needs
    # deterministic, three devices, and memory for another copy of parameters and gradients
    corruption_check_every: Annotated[
        Count,
        needs("train.deterministic", why="it compares the bits of a step"),
        excludes("train.variable_length", why="it compares steps of one length"),
    ] = 0
    # what a run does when a check fails
    on_corruption: Annotated[Literal["stop", "warn"], read_with("train.corruption_check_every")] = (
        "stop"
    )
    # chunks of the sequence whose logits and loss are computed one after the other; 1: all at once.
    # Only one chunk's logits are live, but the head's gradient gets a separate float32 sum
    # [d_model, vocab_size]: saves memory if a microbatch has more tokens than d_model
    loss_chunks: Annotated[
        Positive,
        excludes("parallel.defer_embed_head", why="the head's gradient is made with the loss"),
    ] = 1
    z_loss: Annotated[float, Meta(ge=0)] = 0.0  # factor of the mean of log(Z)^2, Z of the softmax
    # cross_entropy; dpo: of pairs of answers, see [preference]; or "module:function" of your own,
    # of (log-probabilities [B, L], rows of the batch), as jaxpipe/model/objective.py defines it
    loss: Annotated[
        str,
        excludes("parallel.cp", above=1, why=_OF_ROWS),
        excludes("parallel.slices", above=1, why=_OF_ROWS),
        excludes("train.z_loss", why=_OF_ROWS),
        excludes("model.mtp_depth", why=_OF_ROWS),
        excludes("data.packing", when="dpo", why="every answer is a row of its own"),
    ] = "cross_entropy"
    # arrays of the batch that a loss of your own reads besides inputs and targets: "name" is a
    # float32 [M, B, L], "name[K]" [M, B, L, K]; "choices[K]" are int32 tokens, of which it may read
    # the log-probabilities
    loss_rows: Annotated[tuple[LossRow, ...], read_with("train.loss", CUSTOM)] = ()
    # a loss of your own reads the log-probabilities of softmax(logits / loss_temperature)
    loss_temperature: Annotated[Temperature, read_with("train.loss", CUSTOM)] = 1.0
    # steps between held-out losses; 0: never
    eval_every: Annotated[Count, multiple_of("train.fused_steps", why=_BETWEEN)] = 0
    # batches per held-out loss
    eval_steps: Annotated[Positive, read_with("train.eval_every")] = 8
    # steps between evaluations of evaluate_tasks; 0: never. Costs a forward pass for every choice
    # of every example, while training waits
    evaluate_every: Annotated[
        Count,
        needs("train.evaluate_tasks"),
        multiple_of("train.fused_steps", why=_BETWEEN),
        excludes("model.mtp_depth", why="`python -m jaxpipe.evaluate` evaluates without its layer"),
        needs_package("lm_eval", "-e '.[eval]'"),
    ] = 0
    # names of lm-eval's tasks
    evaluate_tasks: Annotated[tuple[str, ...], read_with("train.evaluate_every")] = ()
    # examples per task; 0: all
    evaluate_limit: Annotated[Count, read_with("train.evaluate_every")] = 0
    # folder of tasks of your own
    evaluate_include_path: Annotated[LocalPath, read_with("train.evaluate_every")] = ""
    # a tokenizer.json, or bytes; empty: that of the data
    evaluate_tokenizer: Annotated[str, read_with("train.evaluate_every")] = ""

    @property
    def rematerialisation(self) -> str:
        """What B recomputes, in words: "remat selective, full in the first 3 layers of a stage"."""
        first = self.remat_layers
        layers = f"{first} layers" if first > 1 else "layer"
        which = f", full in the first {layers} of a stage" if first else ""
        return f"remat {self.remat}{which}"
