"""Every setting of a run, by section: frozen records with types, ranges, units and defaults."""

import math
from typing import Annotated, Generic, Literal, Self, TypeVar

from msgspec import Meta, structs

from jaxpipe.config.files import (
    AnyPath,
    CheckpointConfig,
    DataConfig,
    RunConfig,
)
from jaxpipe.config.parallel import ParallelConfig
from jaxpipe.config.path_types import LocalPath
from jaxpipe.config.rules import (
    CUSTOM,
    at_most,
    excludes,
    multiple_of,
    needs,
    needs_package,
    read_with,
    unread_with,
)
from jaxpipe.config.watching import DebugConfig, LogConfig, RuntimeConfig, Section
from jaxpipe.core.contract.sequence import padded_length
from jaxpipe.model import ModelConfig
from jaxpipe.model.family import INT32_MAX, Count, Positive

Seed = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
DecayRate = Annotated[float, Meta(ge=0, lt=1)]
Temperature = Annotated[float, Meta(ge=1e-6, le=1e6)]
LossRow = Annotated[str, Meta(pattern=r"^[A-Za-z_]\w*(\[[1-9]\d{0,5}\])?$")]

_OF_ROWS = "it is computed from the log-probabilities of whole rows alone"
_BETWEEN = "a program runs that many steps, and the state exists only between two programs"

Model = TypeVar("Model", bound=ModelConfig)


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


class PreferenceConfig(Section, frozen=True, kw_only=True):
    """`[preference]`: the loss of pairs of answers, `train.loss = "dpo"`."""

    # how strongly the model is held to the reference
    beta: Annotated[PositiveFloat, read_with("train.loss", "dpo")] = 0.1
    # share of pairs assumed to be labelled the wrong way round; 0: none
    label_smoothing: Annotated[float, Meta(ge=0, lt=0.5), read_with("train.loss", "dpo")] = 0.0


class LoraConfig(Section, frozen=True, kw_only=True):
    """`[lora]`: low-rank adapters, which are trained in place of the model's parameters."""

    # inner width of an adapter; 0: no adapters, all parameters are trained
    rank: Annotated[
        Count,
        at_most("model.d_model", why="no weight has a higher rank"),
        excludes(
            "model.router_bias_rate",
            why="a model with adapters stays as it is, and so do its routers' biases, by "
            "model.router_bias_rate=0 and model.router_bias=true",
        ),
    ] = 0
    # the product of an adapter is scaled by alpha / rank
    alpha: Annotated[PositiveFloat, read_with("lora.rank")] = 16.0
    # names of the layer weights that get an adapter, as "wq", "w_up", "expert_down"; empty: all
    targets: Annotated[tuple[str, ...], read_with("lora.rank")] = ()
    # dropout rate on an adapter's inputs
    dropout: Annotated[float, Meta(ge=0, lt=1), read_with("lora.rank")] = 0.0
    # folder of adapters in PEFT's format to start from; empty: new adapters
    adapter: Annotated[AnyPath, read_with("lora.rank")] = ""


class OptimizerConfig(Section, frozen=True, kw_only=True):
    """`[optimizer]`: the update, its learning rate over time, and clipping."""

    # adafactor, adamw, lion, muon (the layers' matrices; AdamW on the rest), nadamw, schedule_free
    # (AdamW), sgd (momentum beta1), or "module:function" of your own, which returns an
    # optax.GradientTransformation for (learning_rate schedule, this section)
    name: Annotated[
        str,
        needs(
            "optimizer.decay", "constant", when="schedule_free", why="it averages in place of decay"
        ),
        needs("optimizer.beta1", above=0, when="schedule_free", why="beta1 weighs the average"),
    ] = "adamw"
    lr: PositiveFloat = 3e-4  # peak learning rate
    # decay rate of the first moment
    beta1: Annotated[DecayRate, unread_with("optimizer.name", "adafactor")] = 0.9
    # decay rate of the second moment
    beta2: Annotated[DecayRate, unread_with("optimizer.name", "adafactor", "sgd")] = 0.95
    # added to the root of the second moment
    eps: Annotated[PositiveFloat, unread_with("optimizer.name", "adafactor", "lion", "sgd")] = 1e-8
    # decay rate of Muon's momentum
    muon_momentum: Annotated[DecayRate, read_with("optimizer.name", "muon")] = 0.95
    # peak learning rate of Muon's matrices; 0: lr
    muon_lr: Annotated[float, Meta(ge=0), read_with("optimizer.name", "muon")] = 0.0
    weight_decay: Annotated[float, Meta(ge=0)] = 0.1  # weight decay of the layers' matrices
    # embedding and head: factor of weight_decay
    decay_of_embed_head: Annotated[float, Meta(ge=0), read_with("optimizer.weight_decay")] = 1.0
    # norm gains: factor of weight_decay
    decay_of_vectors: Annotated[float, Meta(ge=0), read_with("optimizer.weight_decay")] = 0.0
    clip_norm: Annotated[float, Meta(ge=0)] = 1.0  # limit on the global gradient norm; 0: off
    # learning rate after warm-up. wsd: constant, then linear; wsd_sqrt: constant, then as 1 - sqrt;
    # inverse_sqrt: as one over the square root of the update's number
    decay: Literal["cosine", "wsd", "wsd_sqrt", "linear", "rex", "inverse_sqrt", "constant"] = (
        "cosine"
    )
    warmup_steps: Count = 0  # steps of linear warm-up from lr / warmup_steps to lr
    # final lr over peak lr; for inverse_sqrt the lower limit
    min_lr_ratio: Annotated[Fraction, unread_with("optimizer.decay", "constant")] = 0.1
    # share of all steps in which wsd and wsd_sqrt decay
    wsd_decay_fraction: Annotated[Fraction, read_with("optimizer.decay", "wsd", "wsd_sqrt")] = 0.2


class Config(Section, Generic[Model], frozen=True, kw_only=True):
    """A run's configuration."""

    run: RunConfig = RunConfig()
    model: Model
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig
    preference: PreferenceConfig = PreferenceConfig()
    lora: LoraConfig = LoraConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    debug: DebugConfig = DebugConfig()

    @property
    def batch_shape(self) -> dict[str, int]:
        """M and B of a step over all devices, as keyword arguments of the data readers."""
        parallel, train = self.parallel, self.train
        sequences = train.microbatch_size * parallel.dp // parallel.cp
        return {"microbatches": train.grad_accum_steps, "batch_size": sequences}

    @property
    def scheduled_microbatches(self) -> int:
        """Microbatches of a step as schedules count them: every sequence slice is one."""
        return self.train.grad_accum_steps * self.parallel.slices

    @property
    def halves(self) -> Literal["rows", "sequence"] | None:
        """Of what layers run on halves: a microbatch's rows, or the sequences of an odd number."""
        if not self.parallel.overlap_halves:
            return None
        return "sequence" if self.train.microbatch_size % 2 else "rows"

    @property
    def layer_slices(self) -> int:
        """Sequence slices that a layer gets one after the other; halves of sequences are two."""
        return self.parallel.slices * (2 if self.halves == "sequence" else 1)

    @property
    def sequence_shards(self) -> int:
        """Equal shards of a sequence, over slices and devices; two chunks per ring position."""
        parallel = self.parallel
        over_devices = math.lcm(parallel.cp, 2 * parallel.ring if parallel.rings else 1)
        return self.layer_slices * over_devices * (parallel.tp if parallel.sequence_parallel else 1)

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step over all devices."""
        return math.prod(self.batch_shape.values()) * self.train.seq_len

    def for_evaluation(self) -> Self:
        """The same settings with experts that drop no token, whatever they drop in training."""
        parallel = structs.replace(self.parallel, ep_buffer_factor=0.0)
        return structs.replace(self, model=self.model.for_evaluation(), parallel=parallel)

    @property
    def pads(self) -> bool:
        """Whether rows hold documents of varying length and may end in padding."""
        return self.train.variable_length or self.data.packing != "none" or self.reads_pairs

    @property
    def marks_padding(self) -> bool:
        """Whether the batch has a leaf that marks padding, which experts must not process.

        Packed rows need none, since their document leaf marks it.
        """
        return self.pads and not self.data.documents and self.model.routed_experts > 0

    @property
    def reads_pairs(self) -> bool:
        """Whether rows 2 i and 2 i + 1 of a batch are the two answers of a pair."""
        return self.train.loss == "dpo"

    @property
    def loss_rows(self) -> dict[str, tuple[int, ...]]:
        """The dims after `[M, B, L]` of the batch's arrays that only the loss reads, by name."""
        given = ("reference",) if self.reads_pairs else self.train.loss_rows
        parts = (row.rstrip("]").partition("[") for row in given)
        return {name: (int(width),) if width else () for name, _, width in parts}

    def length_of(self, longest: int) -> int:
        """Tokens per row of a step whose longest row has `longest` tokens."""
        train = self.train
        if not train.variable_length:
            return train.seq_len
        return padded_length(
            longest, bucket=train.length_bucket, multiple=train.pad_to_multiple_of,
            shards=self.sequence_shards, most=train.seq_len,
        )  # fmt: skip
