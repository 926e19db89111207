"""Every setting of a run, by section: frozen records with types, ranges, units and defaults."""

import math
from typing import Annotated, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from jaxpipe.model import ModelConfig
from jaxpipe.model.family import INT32_MAX, Count, Positive
from jaxpipe.partition.sequence import Method, padded_length

Seed = Annotated[int, Meta(ge=0, le=2**32 - 1)]
LocalPath = Annotated[str, Meta(extra={"path": True})]  # relative to where the command was given
Fraction = Annotated[float, Meta(ge=0, le=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
DecayRate = Annotated[float, Meta(ge=0, lt=1)]


Model = TypeVar("Model", bound=ModelConfig)


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class RunConfig(_Section, kw_only=True):
    """`[run]`: where the run lives."""

    dir: LocalPath = ""  # holds data, checkpoints and metrics; empty: runs/<name of the file>


class ParallelConfig(_Section, kw_only=True):
    """`[parallel]`: the mesh, and how the layers and microbatches run on it."""

    pp: Positive = 1  # pipeline ranks
    # data-parallel replicas of every rank; -1: all that fit
    dp: Annotated[int, Meta(ge=-1, le=INT32_MAX)] = 1
    dp_replicate: Positive = 1  # groups of replicas; ZeRO cuts over those of one (HSDP)
    cp: Positive = 1  # of these so many share every sequence, each with a part of its tokens
    # gather: keys and values of all; ring: they go round; ulysses: each has some heads of all
    cp_method: Method = "gather"
    # ring: so many neighbours are one place of it, and exchange heads there; cp: that is ulysses
    cp_heads: Positive = 1
    ep: Positive = 1  # so many of them have parts of every layer's experts
    # rows that one can send to each of these, over the mean of what tokens choose; 0: all there are
    ep_buffer_factor: Annotated[float, Meta(ge=0)] = 0.0
    slices: Positive = 1  # of every sequence in time, which pass the pipeline one by one
    tp: Positive = 1  # devices that share every layer
    pipeline_first: bool = False  # order of devices: ranks of a replica next to each other
    sequence_parallel: bool = False  # cut the stream between sublayers over tp too
    # every rank has a part of embedding and head; auto: on GPU, where the plan is not slower
    vocab_parallel_pp: bool | Literal["auto"] = "auto"
    zero_stage: Literal[0, 1, 2, 3] = 1  # what dp replicas hold parts of; see README
    # dtype in which gradients are summed over dp replicas; bfloat16 halves the bytes sent, but
    # rounds each replica's sum, and their total, to 8 bits
    grad_reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    # zero_stage=3: gather a layer for every action anew; auto: not under pp, else yes
    reshard_after_forward: bool | Literal["auto"] = "auto"
    schedule: str = "1f1b"  # one of jaxpipe.schedule.NAMES
    schedule_file: LocalPath = ""  # custom: a .csv or .json of the orders, in PyTorch's notation
    virtual_stages: Count = 0  # stages a rank, where the schedule leaves it open; 0: its default
    breadth: Count = 0  # microbatches through one stage before a rank's next; 0: the schedule's own
    # of what waits for B or W on a rank: "40GiB"; "auto": what the device has left; "1p", "2p": P
    # or 2P microbatches, from F to B; a number of them in a stage; empty: as the schedule has it
    memory_limit: str | float = ""
    objective: Literal["scan", "span", "makespan"] = "scan"  # what searches make least
    # for searches and plans, a file of measured op seconds; "measure": the run times its own before
    # its first step, and keeps them in run.dir; empty: of an H100
    costs: LocalPath = ""
    layer_split: Literal["even", "weighted"] | tuple[int, ...] = "even"  # or layers per stage
    input_weight: Count = 1  # weighted: layers that the embedding counts for
    output_weight: Count = 1  # weighted: layers that the head counts for
    first_stage_layers: Count = 0  # pins the first stage's layers; 0: not pinned
    last_stage_layers: Count = 0  # pins the last stage's layers; 0: not pinned
    allow_underfilled: bool = False  # let 1f1b run with fewer microbatches than ranks
    # ticks of a transfer; 0: 1 on CPU; on GPU 2, or 1 by turns where the scan is then shorter
    transfer_ticks: Literal[0, 1, 2] = 0
    defer_ends: bool = False  # gradients of embedding and head wait for W of their stages
    in_flight: Count = 0  # microbatches a rank may hold; 0: as the schedule has it

    @property
    def mesh(self) -> str:
        """The sizes of the mesh in words."""
        shared = f" cp={self.cp} ({self.sharing})" if self.cp > 1 else ""
        groups = f" in {self.dp_replicate} groups" if self.dp_replicate > 1 else ""
        experts = f" ep={self.ep}" if self.ep > 1 else ""
        return f"pp={self.pp} dp={self.dp}{groups}{shared}{experts} tp={self.tp}"

    @property
    def sharing(self) -> str:
        """How replicas that share a sequence reach all of it, in words."""
        groups = f" of {self.ring} groups" if self.cp_heads > 1 else ""
        return f"{self.cp_method}{groups}"

    @property
    def exchanging(self) -> int:
        """Replicas that exchange heads of a sequence; 0: none do, and keys are gathered."""
        return {"gather": 0, "ring": self.cp_heads, "ulysses": self.cp}[self.cp_method]

    @property
    def ring(self) -> int:
        """Groups of replicas round which keys and values of a sequence go; 1: they do not."""
        return self.cp // self.exchanging if self.exchanging else 1

    @property
    def rings(self) -> bool:
        """Whether keys and values go round the replicas that share a sequence."""
        return self.ring > 1

    @property
    def stretches(self) -> int:
        """Equal parts that a sequence is cut into, in time and over devices, two a ring's place."""
        over_devices = math.lcm(self.cp, 2 * self.ring if self.rings else 1)
        return self.slices * over_devices * (self.tp if self.sequence_parallel else 1)

    @property
    def least_devices(self) -> int:
        """Devices of the fewest replicas that there can be."""
        return self.pp * self.tp * math.lcm(self.cp, self.ep)

    @property
    def reshards(self) -> bool:
        """Whether every action gathers its layers anew; M microbatches then pay M times for it."""
        if self.reshard_after_forward == "auto":
            return self.zero_stage == 3 and self.pp == 1
        return self.reshard_after_forward

    @property
    def ends_shared_by(self) -> int:
        """Pipeline ranks that share embedding and head; 0: they do not, or it is not decided."""
        return self.pp if self.vocab_parallel_pp is True else 0


class TrainConfig(_Section, kw_only=True):
    """`[train]`: the size of a step and the number of steps."""

    steps: Positive  # updates in the whole run
    # in one program; a rank updates its stages and begins the next step while others drain
    fused_steps: Positive = 1
    grad_accum_steps: Count = 0  # microbatches of a step (M); 0: as batch_tokens says
    batch_tokens: Count = 0  # of a step over all devices, instead of grad_accum_steps
    microbatch_size: Positive  # sequences in a microbatch, on each dp rank; with cp, stretches
    seq_len: Annotated[int, Meta(ge=2, le=INT32_MAX)]  # tokens in a sequence
    # a step is as long as the longest of its rows, which hold whole documents of up to seq_len
    variable_length: bool = False
    length_bucket: Count = 1024  # of variable lengths, rounded up to a multiple; 0: as below alone
    pad_to_multiple_of: Positive = 128  # the stretch of a sequence that a device then computes
    seed: Seed = 0  # of the initial values and the order of the data
    # parameters and sums stay float32
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    # layers multiply in 8-bit floats, scaled by each operand as it is (current), or by the largest
    # of the last steps (delayed); with compute_dtype=bfloat16
    fp8: Literal["none", "current", "delayed"] = "none"
    fp8_history: Annotated[int, Meta(ge=1, le=2**16)] = 1024  # delayed: of so many steps
    remat: Literal["none", "selective", "full"] = "none"  # what B repeats
    offload_layers: Count = 0  # of every stage the first: their residuals wait on the host
    offload_moments: bool = False  # the optimizer's moments wait on the host between updates
    deterministic: bool = False  # the same bits again on the same devices; costs time on GPUs
    # steps in a row that may be left out where loss or gradient is not finite; 0: the run stops.
    # With float16 the loss is then scaled by what has not overflowed
    skip_non_finite: Count = 0
    loss_chunks: Positive = 1  # of the sequence: only one's logits are held
    z_loss: Annotated[float, Meta(ge=0)] = 0.0  # times the mean of log(Z)^2, Z of the softmax
    eval_every: Count = 0  # steps between held-out losses; 0: never
    eval_steps: Positive = 8  # batches of one held-out loss


class OptimizerConfig(_Section, kw_only=True):
    """`[optimizer]`: the update, its learning rate over time, and clipping."""

    # muon: on layers' matrices, else AdamW; schedule_free: AdamW that averages, for decay=constant
    name: Literal["adamw", "lion", "muon", "schedule_free"] = "adamw"
    lr: PositiveFloat = 3e-4  # peak
    beta1: DecayRate = 0.9  # of the mean gradient
    beta2: DecayRate = 0.95  # of the mean squared gradient
    eps: PositiveFloat = 1e-8  # added to the root of the second moment
    muon_momentum: DecayRate = 0.95  # of muon's mean gradient
    muon_lr: Annotated[float, Meta(ge=0)] = 0.0  # peak, of muon's matrices; 0: lr
    weight_decay: Annotated[float, Meta(ge=0)] = 0.1  # of the layers' matrices
    decay_of_ends: Annotated[float, Meta(ge=0)] = 1.0  # times that: embedding and head
    decay_of_vectors: Annotated[float, Meta(ge=0)] = 0.0  # times that: norm gains
    clip_norm: Annotated[float, Meta(ge=0)] = 1.0  # of the global gradient norm; 0: off
    # wsd: linear at the end, wsd_sqrt: as 1 - sqrt; inverse_sqrt: of the update's number
    decay: Literal["cosine", "wsd", "wsd_sqrt", "linear", "rex", "inverse_sqrt", "constant"] = (
        "cosine"
    )
    warmup_steps: Count = 0  # linear, from 0
    min_lr_ratio: Fraction = 0.1  # of lr, at the last step; of inverse_sqrt the least
    wsd_decay_fraction: Fraction = 0.2  # share of the steps that wsd and wsd_sqrt decay in


class SourceConfig(_Section, kw_only=True):
    """`[[data.sources]]`: one of several that are mixed."""

    path: LocalPath  # a file of token ids, a folder of them, or a pattern such as "tokens/*.bin"
    weight: Annotated[float, Meta(ge=0)] = 1.0  # of the samples, beside the others'


class DataConfig(_Section, kw_only=True):
    """`[data]`: where tokens come from."""

    source: Literal["stdlib", "dummy", "file"] = "stdlib"  # stdlib: bytes of Python's own sources
    # file: of token ids, or a folder of them, or a pattern such as "tokens/*.bin"
    path: LocalPath = ""
    sources: tuple[SourceConfig, ...] = ()  # several, mixed, in place of source and path
    heldout_path: LocalPath = ""  # another for held-out losses; empty: the end of each source
    heldout_fraction: Annotated[float, Meta(gt=0, lt=1)] = 0.05  # held out, if no path is given
    shuffle: bool = True  # a new order of samples every epoch
    # documents in rows that they share without seeing each other: in their order, or where they
    # fit best; none: rows are seq_len tokens on end, or with train.variable_length a document each
    packing: Literal["none", "sequential", "best_fit"] = "none"
    max_documents: Positive = 64  # that a packed row may hold
    # when a checkpoint was trained on other data, another mixture or seq_len: go on from position 0
    # of this data, with the step and the moments; false: refuse. Once on it, resumes go on in it
    restart: bool = False

    @property
    def documents(self) -> int:
        """Documents that a row may hold; 0: rows are not packed."""
        return 0 if self.packing == "none" else self.max_documents


class CheckpointConfig(_Section, kw_only=True):
    """`[checkpoint]`: when the state is saved, in `<run.dir>/checkpoints`."""

    every: Count = 0  # steps between saves; 0: only at the end
    keep: Positive = 2  # the newest ones that stay on disk
    keep_every: Count = 0  # those of every so many steps stay too; 0: no more
    # auto: from the newest, if there is one; a path: else from there; none: there must be none
    resume: LocalPath = "auto"
    parameters_only: bool = False  # of a path take no more: step 0, fresh moments
    # of a path not these parameters, by names such as "ends/head": new values, fresh moments
    exclude: tuple[str, ...] = ()
    # fields of [model] that may differ from those a checkpoint was trained with, such as
    # "model.rope_factor"; every other change that makes it another model is refused
    allow_changed: tuple[str, ...] = ()
    asynchronous: bool = True  # write while training goes on


class LogConfig(_Section, kw_only=True):
    """`[log]`: what is shown and written."""

    every: Positive = 1  # steps between printed lines when the output is not a terminal
    tensorboard: bool = True  # event files beside metrics.jsonl
    wandb: Literal["", "offline", "online"] = ""  # Weights & Biases; needs the extra `wandb`
    wandb_project: str = "jaxpipe"  # its group is named as the last folder of run.dir
    progress: bool = True  # a live line on terminals
    profile_start: Count = 0  # first step that jax's profiler records; 0: none
    profile_steps: Positive = 3  # how many it records
    bubble_every: Count = 0  # steps from one whose bubble is measured to the next; 0: never


class RuntimeConfig(_Section, kw_only=True):
    """`[runtime]`: devices."""

    # virtual CPU devices of a process; 0: the devices that jax finds
    cpu_devices: Annotated[int, Meta(ge=0, le=4096)] = 0


class DebugConfig(_Section, kw_only=True):
    """`[debug]`: steps to look into, not to train with."""

    skip_update: bool = False  # steps run; parameters, moments and model state stay as they are
    # a line for every message between pipeline ranks with its norm, in every step; slow
    print_messages: bool = False
    ticks: tuple[int, ...] = ()  # first and last tick printed; empty: all
    pp_ranks: tuple[int, ...] = ()  # pipeline ranks printed; empty: all
    # idle messages and free buffer slots hold NaN, so that a result that depends on one is NaN
    poison_messages: bool = False


class Config(_Section, Generic[Model], kw_only=True):
    """A whole run."""

    run: RunConfig = RunConfig()
    model: Model
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    debug: DebugConfig = DebugConfig()

    @property
    def batch_shape(self) -> dict[str, int]:
        """M and B of a step over all devices, as the data's readers take them."""
        parallel, train = self.parallel, self.train
        sequences = train.microbatch_size * parallel.dp // parallel.cp
        return {"microbatches": train.grad_accum_steps, "batch_size": sequences}

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step trains on, over all devices."""
        return math.prod(self.batch_shape.values()) * self.train.seq_len

    @property
    def pads(self) -> bool:
        """Whether rows have documents of their own lengths, so that they may end in padding."""
        return self.train.variable_length or self.data.packing != "none"

    @property
    def marks_padding(self) -> bool:
        """Whether a leaf of the batch tells rows from their padding, which experts must not take.

        Documents of packed rows do so by themselves.
        """
        return (
            self.train.variable_length and not self.data.documents and self.model.routed_experts > 0
        )

    def length_of(self, longest: int) -> int:
        """Tokens of the rows of a step whose longest has so many."""
        train = self.train
        if not train.variable_length:
            return train.seq_len
        return padded_length(
            longest, bucket=train.length_bucket, multiple=train.pad_to_multiple_of,
            stretches=self.parallel.stretches, most=train.seq_len,
        )  # fmt: skip
