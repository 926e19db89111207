"""The section `[parallel]`: how devices share the model and the batch."""

from typing import Annotated, Literal

from msgspec import Meta

from jaxpipe.config.path_types import LocalPath
from jaxpipe.config.rules import divides, excludes, multiple_of, needs, read_with, unread_with
from jaxpipe.config.watching import Section
from jaxpipe.core.contract.sequence import Method
from jaxpipe.model.family import INT32_MAX, Count, Positive

_Weight = Annotated[
    Count,
    read_with("parallel.layer_split", "weighted"),
    unread_with("parallel.first_stage_layers"),
    unread_with("parallel.last_stage_layers"),
]
_Pinned = Annotated[
    Count, excludes("parallel.layer_split", "balanced", why="that chooses the layers of all stages")
]


class ParallelConfig(Section, frozen=True, kw_only=True):
    """`[parallel]`: the mesh, the sharding, and the pipeline schedule."""

    pp: Positive = 1  # pipeline ranks
    # data-parallel replicas; -1: as many as the devices allow
    dp: Annotated[
        int,
        Meta(ge=-1, le=INT32_MAX),
        multiple_of("parallel.dp_replicate", "parallel.cp", why="cp replicas share a sequence"),
    ] = 1
    # groups of replicas that hold all shards each; ZeRO shards within a group (HSDP); 1: plain ZeRO
    dp_replicate: Annotated[
        Positive,
        needs("parallel.zero_stage", above=0, why="groups differ only where replicas hold shards"),
    ] = 1
    cp: Positive = 1  # replicas that share every sequence (context parallelism; a factor of dp)
    # how attention reaches other sequence shards. gather: all-gather keys and values; ring: pass
    # them around the devices; ulysses: exchange tokens for heads by all-to-all
    cp_method: Method = "gather"
    # neighbouring devices that exchange heads within one ring position; 1: plain ring attention,
    # cp: the same as ulysses
    cp_heads: Annotated[
        Positive,
        read_with("parallel.cp_method", "ring"),
        divides("parallel.cp", why="that many replicas are one ring position"),
    ] = 1
    # devices that share the experts of every layer (expert parallelism): replicas, a factor of dp;
    # with ep_over_tp a multiple of tp and a factor of dp x tp
    ep: Annotated[
        Positive,
        needs("model.n_experts"),
        divides("model.n_experts", why="each has as many of the experts as the others"),
    ] = 1
    # count devices along tp among those of ep: each has whole experts and sends its own share of a
    # sequence's tokens; false: tp shards the width of every expert, and its devices send all tokens
    ep_over_tp: Annotated[
        bool,
        needs("parallel.ep", above=1, why="it says over which devices experts are shared"),
        needs("parallel.sequence_parallel", why="that shards the tokens over tp"),
    ] = False
    # consecutive devices of ep that are in one host: a token is sent once to every host that has
    # experts of it, and spread inside (two-stage all-to-all); 1, or ep: a token is sent straight to
    # every device that has experts of it
    ep_per_host: Annotated[
        Positive,
        divides("parallel.ep", why="hosts have equally many of these devices"),
        excludes("model.capacity_factor", why="the slots of a capacity belong to single experts"),
    ] = 1
    # capacity of the expert all-to-all buffer, as a multiple of the mean load; 0: worst case,
    # nothing overflows
    ep_buffer_factor: Annotated[
        float,
        Meta(ge=0),
        read_with("parallel.ep", above=1),
        excludes("model.capacity_factor", why="the slots of a capacity are the buffers"),
    ] = 0.0
    slices: Positive = 1  # sequence slices, which pass the pipeline one after the other
    tp: Positive = 1  # devices that share every layer (tensor parallelism)
    pipeline_first: bool = False  # order devices so that a replica's pipeline ranks are neighbours
    # shard the residual stream along the sequence over tp, between the layers' tp regions
    sequence_parallel: Annotated[
        bool, needs("parallel.tp", above=1, why="it shards the sequence over tp")
    ] = False
    # run every layer on two halves of a microbatch's rows, which alternate in F and B: one computes
    # while the other waits for its collectives over tp, ep or cp (Wang et al. 2024, "Domino").
    # Products other than those of weight gradients have half the rows. With an odd number of rows
    # the halves are those of the sequences, as two parallel.slices in one action
    overlap_halves: bool = False
    # shard embedding and head over pipeline ranks; auto: on GPU, if the simulated scan is at most
    # 1 % longer
    vocab_parallel_pp: Annotated[
        bool | Literal["auto"],
        needs("parallel.pp", above=1, when=True, why="it shards the vocabulary over pp"),
        excludes(
            "parallel.defer_embed_head",
            when=True,
            why="an embedding and head that all ranks share leave nothing to even out by waiting",
        ),
    ] = "auto"
    # what replicas shard. 0: nothing; 1: parameters and moments; 2: gradients too; 3: parameters
    # also within a step
    zero_stage: Literal[0, 1, 2, 3] = 1
    # dtype in which gradients are reduced over replicas; bfloat16 halves the bytes sent, but rounds
    # each replica's sum, and their total, to 8 bits
    grad_reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    # with zero_stage=3: all-gather a layer for every action instead of once a step; saves memory,
    # costs M times as many gathers; auto: if pp is 1
    reshard_after_forward: Annotated[
        bool | Literal["auto"],
        needs("parallel.zero_stage", 3, when=True, why="below 3 parameters are full within a step"),
    ] = "auto"
    schedule: str = "1f1b"  # pipeline schedule, one of jaxpipe.schedules.NAMES
    # schedule=custom: .csv or .json with the actions of each pipeline rank, in PyTorch's notation
    schedule_file: LocalPath = ""
    # stages per pipeline rank, for schedules with a choice; 0: the schedule's default
    virtual_stages: Count = 0
    # microbatches that a pipeline rank runs through one stage before its next stage; 0: the default
    # of the schedule
    breadth: Count = 0
    # limit on live activations per pipeline rank. "40GiB": bytes; "auto": the bytes that the device
    # has left; "1p", "2p": P or 2P microbatches on all stages of the rank; a number: microbatches
    # on one stage; empty: the default of the schedule
    memory_limit: str | Annotated[float, Meta(gt=0)] = ""
    # what a schedule search minimises. scan: time of the lockstep scan; the others are times of
    # ranks that run asynchronously. span: the longest time of a rank from its first start to its
    # last end; makespan: the time from the first start to the last end over all ranks
    objective: Literal["scan", "span", "makespan"] = "scan"
    # op times [s] for searches and plans: a file of measured ones; "measure": the run measures them
    # before its first step and stores them in run.dir; empty: estimates for an H100
    costs: LocalPath = ""
    # layers of each stage; even, weighted (embedding and head count as layers), balanced (by the
    # estimated time of every layer, embedding and head included, within memory_limit), or a list of
    # counts, in which the first and the last may be 0 (embedding or head alone); balanced costs up
    # to seconds at the start
    layer_split: Literal["even", "weighted", "balanced"] | tuple[int, ...] = "even"
    input_weight: _Weight = 1  # cost of the embedding [layers]
    output_weight: _Weight = 1  # cost of the head [layers]
    first_stage_layers: _Pinned = 0  # layers of the first stage; 0: by layer_split
    last_stage_layers: _Pinned = 0  # layers of the last stage; 0: by layer_split
    allow_underfilled: bool = False  # accept fewer microbatches than pipeline ranks
    # ticks of a transfer; 0: 1 on CPU; on GPU 2, or 1 with phased permutes if the scan is shorter
    transfer_ticks: Literal[0, 1, 2] = 0
    # defer weight gradients of embedding and head to W of their stages; keeps logit gradients live
    defer_embed_head: bool = False
    # limit on live microbatches per pipeline rank, within which forwards run ahead of the
    # schedule's order; 0: forwards keep the order. For 1f1b, 2 pp - 1 (2 pp with
    # vocab_parallel_pp, and slices - 1 more with slices) hides the idle time of lockstep execution,
    # but takes memory; for interleaved_1f1b, pp (virtual_stages + 1) - 1 hides it with
    # transfer_ticks=1, in the memory that the schedule needs anyway
    in_flight: Count = 0
    # longest series of layers of one kind on a pipeline rank that the program unrolls. A longer
    # series is a loop with this many layers per iteration: its compile time does not grow with the
    # layers, but it hides fewer collectives. 0: 4 on CPU, and where dp and tp are 1 without fp8 (an
    # iteration then has 1 layer); otherwise, or where no loop is possible, all layers are unrolled.
    # With experts on GPUs, 4 hides the all-to-alls as well as unrolling all, in a quarter of the
    # compile time
    unroll_layers: Count = 0

    @property
    def mesh(self) -> str:
        """The mesh as text, for logs."""
        shared = f" cp={self.cp} ({self.sharing})" if self.cp > 1 else ""
        groups = f" in {self.dp_replicate} groups" if self.dp_replicate > 1 else ""
        experts = f" ep={self.ep}" if self.ep > 1 else ""
        experts += " over tp" if self.ep_over_tp else ""
        experts += f" in hosts of {self.ep_per_host}" if self.ep_hosts > 1 else ""
        return f"pp={self.pp} dp={self.dp}{groups}{shared}{experts} tp={self.tp}"

    @property
    def sharing(self) -> str:
        """The method of context parallelism as text, for logs."""
        groups = f" of {self.ring} groups" if self.cp_heads > 1 else ""
        return f"{self.cp_method}{groups}"

    @property
    def exchanging(self) -> int:
        """Replicas that exchange heads; 0: none, keys and values are all-gathered."""
        return {"gather": 0, "ring": self.cp_heads, "ulysses": self.cp}[self.cp_method]

    @property
    def ring(self) -> int:
        """Groups of replicas in the ring of keys and values; 1: there is no ring."""
        return self.cp // self.exchanging if self.exchanging else 1

    @property
    def rings(self) -> bool:
        """Whether keys and values travel around a ring."""
        return self.ring > 1

    @property
    def rows_per_sequence(self) -> int:
        """Rows of microbatches that a sequence becomes: its slices x the replicas that share it."""
        return self.slices * self.cp

    @property
    def ep_replicas(self) -> int:
        """Replicas that share the experts of a layer: the size of the mesh axis ep."""
        return self.ep // self.tp if self.ep_over_tp else self.ep

    @property
    def ep_hosts(self) -> int:
        """Hosts to each of which a token is sent once; 1: it is sent straight to devices."""
        return self.ep // self.ep_per_host if self.ep_per_host > 1 else 1

    @property
    def devices(self) -> int:
        """Number of devices of the mesh."""
        return self.pp * self.dp * self.tp

    @property
    def reshards(self) -> bool:
        """Whether every action all-gathers its layers, M times a step for M microbatches."""
        if self.reshard_after_forward == "auto":
            return self.zero_stage == 3 and self.pp == 1
        return self.reshard_after_forward

    @property
    def vocab_shared_by(self) -> int:
        """Pipeline ranks that share embedding and head; 0: none, or not known yet ("auto")."""
        return self.pp if self.vocab_parallel_pp is True else 0
