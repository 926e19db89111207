"""The sections that say how a run is watched: its log, its devices and its debugging."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from jaxpipe.config.path_types import StatePath
from jaxpipe.config.rules import at_most, excludes, needs, needs_package, read_with, unread_with
from jaxpipe.model.family import INT32_MAX, Count, Positive


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, cache_hash=True):
    """A section of the configuration: a frozen record that refuses unknown keys."""


class LogConfig(Section, frozen=True, kw_only=True):
    """`[log]`: what is printed and written."""

    every: Positive = 1  # steps between printed lines when the output is not a terminal
    tensorboard: bool = True  # write TensorBoard event files besides metrics.jsonl
    # Weights & Biases; empty: off
    wandb: Annotated[Literal["", "offline", "online"], needs_package("wandb")] = ""
    # W&B project; the group is the last folder of run.dir
    wandb_project: Annotated[str, read_with("log.wandb")] = "jaxpipe"
    # port at which process 0 serves the newest step's metrics to Prometheus, to all hosts without
    # authentication; 0: none
    prometheus_port: Annotated[int, Meta(ge=0, le=65535), needs_package("prometheus_client")] = 0
    progress: bool = True  # show a progress line on terminals
    # first step that jax's profiler records; 0: none
    profile_start: Annotated[
        Count,
        at_most("train.steps"),
        excludes("log.bubble_every", why="jax records one of them at a time"),
    ] = 0
    # number of steps that jax's profiler records
    profile_steps: Annotated[Positive, read_with("log.profile_start")] = 3
    # steps between measurements of the bubble; 0: never
    bubble_every: Annotated[
        Count, needs("parallel.pp", above=1, why="without a pipeline there is no bubble")
    ] = 0
    # with several processes, name the one that slows the others by its data loader or host, and in
    # the steps of bubble_every the slow op or link; costs a message per process every 10 steps
    stragglers: Literal["auto", "off"] = "auto"


class RuntimeConfig(Section, frozen=True, kw_only=True):
    """`[runtime]`: devices."""

    # virtual CPU devices per process; 0: use the devices that jax finds
    cpu_devices: Annotated[int, Meta(ge=0, le=4096)] = 0
    # fewest devices on which a run goes on after processes are lost for good: it takes a smaller
    # dp, or else another pp, and keeps the batch; 0: it needs all devices of its mesh
    min_devices: Annotated[
        Count,
        at_most("parallel.pp", "parallel.dp", "parallel.tp"),
        excludes("parallel.dp", -1, why="-1 takes any number of devices by itself"),
    ] = 0
    # limit on the time without progress in a step, batch, held-out batch or save [s], beyond which
    # the run counts as hung and exits with code 5; what moves bytes, finishes files or makes tokens
    # makes progress. auto: 5 median steps, at least 60, but 600 for a save and until the first step
    # has finished; 0: off, as for a debugger. Copying data, restoring and generating have at least
    # 600, starting and compiling 1800
    hang_timeout: Annotated[float, Meta(ge=0, le=INT32_MAX)] | Literal["auto"] = "auto"
    # directory of compiled programs, or its address, which the next start loads; auto: one in the
    # user's cache directory, entries removed after 30 days; "": none. JAX_COMPILATION_CACHE_DIR
    # takes precedence
    compile_cache: StatePath = "auto"
    # directory of training steps compiled ahead (`plan --check-gpu --save`), one of which the run
    # loads if it is of the same program, devices and versions; all processes load it or none does;
    # "": none
    programs: Annotated[str, unread_with("train.variable_length")] = ""


class DebugConfig(Section, frozen=True, kw_only=True):
    """`[debug]`: settings to inspect steps, not to train with."""

    skip_update: bool = False  # run steps without changing parameters, moments and variables
    # print every message between pipeline ranks with its norm, in every step; slow
    print_messages: Annotated[
        bool, needs("parallel.pp", above=1, why="one pipeline rank sends no messages")
    ] = False
    # first and last tick printed; empty: all
    ticks: Annotated[tuple[int, ...], read_with("debug.print_messages")] = ()
    # pipeline ranks printed; empty: all
    pp_ranks: Annotated[tuple[int, ...], read_with("debug.print_messages")] = ()
    # fill idle messages and free buffer slots with NaN, so that any result that reads one is NaN
    poison_messages: bool = False
