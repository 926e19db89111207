"""The sections that name files: the run directory, its data and its checkpoints."""

from typing import Annotated, Literal

from msgspec import Meta

from jaxpipe.config.path_types import AnyPath, LocalPath, StatePath
from jaxpipe.config.rules import multiple_of, needs, read_with, unread_with
from jaxpipe.config.watching import Section
from jaxpipe.model.family import Count, Positive


class RunConfig(Section, frozen=True, kw_only=True):
    """`[run]`: the run directory."""

    # folder of data, checkpoints and metrics, or its address gs://... or s3://...; empty:
    # runs/<config's name>
    dir: StatePath = ""


class SourceConfig(Section, frozen=True, kw_only=True):
    """`[[data.sources]]`: one source of a mixture."""

    path: AnyPath  # file of token ids, folder of such files, or pattern like "tokens/*.bin"
    weight: Annotated[float, Meta(ge=0)] = 1.0  # share of the samples, relative to other sources


class DataConfig(Section, frozen=True, kw_only=True):
    """`[data]`: the source of tokens."""

    # stdlib: bytes of Python's standard library; dummy: random tokens; file: token ids from path
    source: Annotated[Literal["stdlib", "dummy", "file"], unread_with("data.sources")] = "stdlib"
    # file of token ids, folder of them, or pattern like "tokens/*.bin"
    path: Annotated[AnyPath, unread_with("data.sources"), read_with("data.source", "file")] = ""
    sources: tuple[SourceConfig, ...] = ()  # mixture of sources, in place of source and path
    # columns of Parquet beside the ids that are left out although they may change what is trained
    ignore_columns: tuple[str, ...] = ()
    heldout_path: AnyPath = ""  # tokens of held-out losses; empty: the end of each source
    # share of each source that is held out
    heldout_fraction: Annotated[float, Meta(gt=0, lt=1), unread_with("data.heldout_path")] = 0.05
    shuffle: bool = True  # new order of samples every epoch
    # several documents per row, which do not attend to each other: in their order (sequential) or
    # with least padding (best_fit); none: rows are seq_len consecutive tokens, or with
    # train.variable_length one document each
    packing: Annotated[
        Literal["none", "sequential", "best_fit"],
        needs("data.shuffle", when="best_fit", why="else rows come in the order of their lengths"),
    ] = "none"
    # limit on the documents in a packed row; with attention "cudnn" each takes 8 bytes x heads x
    # head dim x tokens of a row in BW
    max_documents: Annotated[Positive, read_with("data.packing")] = 64
    # rows per block of the packed training order; the rows of a block need similar attention. With
    # as many as a step has rows (M x B) all microbatches of a step take similar time, but its
    # documents are alike; 1: only permute the rows of a step; 0: keep the order. Costs a sort on
    # the host
    balance_rows: Annotated[
        Count, read_with("data.packing", why="other rows have equal attention")
    ] = 0
    # on resuming a checkpoint of other data, mixture or seq_len: continue its step and moments at
    # position 0 of the new data, and later resumes continue there; false: refuse
    restart: bool = False

    @property
    def documents(self) -> int:
        """Limit on the documents in a row; 0: rows are not packed."""
        return 0 if self.packing == "none" else self.max_documents


_OF_PATH = unread_with(
    "checkpoint.resume", "auto", "none", why="it says what to take from the path that resume gives"
)


class CheckpointConfig(Section, frozen=True, kw_only=True):
    """`[checkpoint]`: saves to `<run.dir>/checkpoints`, and what a run starts from."""

    # steps between saves; 0: only at the end
    every: Annotated[Count, multiple_of("train.fused_steps")] = 0
    # steps between exports for transformers to <run.dir>/exports, which a process of its own writes
    # from a checkpoint while training continues; a multiple of every; 0: none
    export_every: Count = 0
    # steps between local saves, from which a run goes on unless run.dir has a newer save: every
    # process keeps its shards in local_dir, and a process on the next host keeps a copy; 0: none.
    # Costs a copy of the state to the host, and in local_dir up to six times a process's shards
    local_every: Annotated[
        Count, needs("checkpoint.local_dir"), multiple_of("train.fused_steps")
    ] = 0
    # folder on each host's own disk, or in its memory (/dev/shm/...)
    local_dir: Annotated[LocalPath, read_with("checkpoint.local_every")] = ""
    keep: Positive = 2  # number of newest checkpoints that stay on disk
    # checkpoints at multiples of this step also stay; 0: none
    keep_every: Annotated[Count, read_with("checkpoint.every")] = 0
    # auto: resume from the run's newest checkpoint, if any; a path: if there is none, start from
    # that checkpoint; none: refuse to start if the run has any
    resume: StatePath = "auto"
    # take only parameters from the path: step 0, new moments
    parameters_only: Annotated[bool, _OF_PATH] = False
    # names ("embed_head/head") of parameters not to take from the path: new values and moments
    exclude: Annotated[tuple[str, ...], _OF_PATH] = ()
    # fields of [model] that may differ from the checkpoint's, such as "model.rope_factor"; every
    # other change of the model is refused
    allow_changed: Annotated[tuple[str, ...], unread_with("checkpoint.resume", "none")] = ()
    asynchronous: bool = True  # write in the background while training continues
