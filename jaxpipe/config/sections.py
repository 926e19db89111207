"""The configuration of a run, and its sections on preferences, adapters and the optimizer."""

import math
from typing import Annotated, Generic, Literal, Self, TypeVar

from msgspec import Meta, structs

from jaxpipe.config.files import AnyPath, CheckpointConfig, DataConfig, RunConfig
from jaxpipe.config.parallel import ParallelConfig
from jaxpipe.config.rules import at_most, excludes, needs, read_with, unread_with
from jaxpipe.config.train import TrainConfig
from jaxpipe.config.watching import DebugConfig, LogConfig, RuntimeConfig, Section
from jaxpipe.core.contract.sequence import padded_length
from jaxpipe.model import ModelConfig
from jaxpipe.model.family import Count

Fraction = Annotated[float, Meta(ge=0, le=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
DecayRate = Annotated[float, Meta(ge=0, lt=1)]

Model = TypeVar("Model", bound=ModelConfig)


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
