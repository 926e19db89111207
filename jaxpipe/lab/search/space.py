"""The settings among which a search chooses, as configurations on a number of devices."""

from collections.abc import Callable, Iterable, Iterator
from math import lcm
from typing import Any

from msgspec import structs

from jaxpipe.config import Config, ConfigError
from jaxpipe.planning.candidates import variants, with_variant
from jaxpipe.planning.loops import unroll_if_needed
from jaxpipe.planning.resolve import RunPlan
from jaxpipe.planning.rules.across import check_settings
from jaxpipe.planning.rules.sizes import check_count, check_filling, resolve_sizes
from jaxpipe.schedules import ScheduleVariant, find_family

_SEQUENCES = (1, 2, 4, 8)  # of a microbatch: more have the same products and fewer microbatches
_SHARD = 2048  # fewest tokens of a sequence on a device with which more cp is tried
_ANY = ScheduleVariant("gpipe")  # allows all that some schedule allows
SEARCHED = {
    "parallel": (
        "pp", "dp", "tp", "cp", "cp_heads", "ep", "ep_over_tp", "sequence_parallel",
        "overlap_halves", "vocab_parallel_pp",
        "zero_stage", "dp_replicate", "schedule", "schedule_file", "virtual_stages",
        "memory_limit", "in_flight", "breadth", "layer_split", "unroll_layers",
    ),
    "train": (
        "grad_accum_steps", "batch_tokens", "microbatch_size", "remat", "remat_layers",
        "offload_layers", "offload_moments",
    ),
}  # fmt: skip


class SearchSpace:
    """Configurations with the tokens of a step of one, on all of `devices` devices.

    They differ in pp, dp, tp, cp, ep (also over tp), sequence and vocabulary parallelism,
    microbatch size, remat, schedule, stages per rank, layers in halves, offloading, ZeRO stage and
    groups of replicas, of which a host is one if there are several.
    tp divides the devices of a host, and cp leaves a device 2,048 tokens of a sequence, if the
    configuration has no more of them. Of the schedules that are searched themselves there is only
    the configuration's. All other settings are the configuration's.

    Args:
      config: gives the tokens of a step, the model, and all that is not searched.
      devices: number of devices.
      fixed: names of settings ("parallel.tp") that stay as they are.
      per_host: number of devices of a host.

    Raises `ConfigError` if the tokens of a step are not known, because a configuration of
    `parallel.dp=-1` does not fit the devices.
    """

    def __init__(self, config: Config, devices: int, fixed: Iterable[str] = (), per_host: int = 8):
        self.devices, self._fixed = devices, frozenset(fixed)
        self._host = min(per_host, devices)
        if config.parallel.costs:
            raise ConfigError(
                f"--search with parallel.costs={config.parallel.costs!r}: measured seconds are of "
                f"one mesh and microbatch size; leave them out."
            )
        runtime = structs.replace(config.runtime, cpu_devices=0)
        self.config = structs.replace(config, runtime=runtime)
        self._own = config.parallel
        self.tokens = config.train.batch_tokens or _tokens_of(config, devices)
        self.refusals: dict[str, None] = {}  # sentences on what is not possible, as a set

    @property
    def fixed(self) -> list[str]:
        """The settings that stay as they are, with their values."""
        sections = (name.split(".") for name in sorted(self._fixed))
        return [f"{s}.{key}={getattr(getattr(self.config, s), key)}" for s, key in sections]

    def meshes(self) -> Iterator[Config]:
        """Yield the configurations of all meshes, with the sharing of embedding and head."""
        own, model = self._own, self.config.model
        free = "parallel.dp" not in self._fixed or own.dp == -1
        for pp in self._choose("parallel.pp", _divisors(self.devices)):
            for tp in self._choose("parallel.tp", _divisors(self.devices)):
                dp, remainder = divmod(self.devices, pp * tp)
                legal = pp <= model.pipeline_layers and (self._host % tp == 0 or tp == own.tp)
                if remainder or not legal or not (free or dp == own.dp):
                    continue
                for cp in self._choose("parallel.cp", self._sequence_shards(dp)):
                    for experts in self._shared_experts(dp, tp):
                        yield from self._shared(dict(pp=pp, dp=dp, tp=tp, cp=cp) | experts)

    def shapes(self, mesh: Config) -> Iterator[Config]:
        """Yield the configurations of a mesh by microbatch size and remat, least memory first."""
        parallel, own = mesh.parallel, self.config.train
        if next(self._variants(mesh), None) is None:
            split = list(parallel.layer_split)
            self.refusals[
                f"no schedule that the search may use has the {len(split)} stages of "
                f"parallel.layer_split={split} with parallel.pp={parallel.pp}: change one of them, "
                f"or leave layer_split out."
            ] = None
            return
        sizes = sorted({*_SEQUENCES, own.microbatch_size})
        for size in self._choose("train.microbatch_size", sizes):
            each = size * own.seq_len * parallel.dp
            microbatches, remainder = divmod(self.tokens * parallel.cp, each)
            is_fixed = "train.grad_accum_steps" in self._fixed
            if is_fixed and microbatches != own.grad_accum_steps:
                continue
            if remainder or not microbatches:
                self.refusals[
                    f"the {self.tokens} tokens of a step are no multiple of those of a microbatch "
                    f"on {parallel.dp // parallel.cp} replicas, {each // parallel.cp}: change "
                    f"train.grad_accum_steps, or the number of devices."
                ] = None
                continue
            ahead = ("ahead",) if parallel.pp > 1 else ()  # where a rank may wait
            for remat in self._choose("train.remat", ("full", *ahead, "selective", "none")):
                recomputed = own.remat_layers * ("train.remat_layers" in self._fixed)
                train = structs.replace(
                    own, microbatch_size=size, remat=remat, grad_accum_steps=microbatches,
                    batch_tokens=0, remat_layers=recomputed,
                )  # fmt: skip
                shape = structs.replace(mesh, train=train)
                if self.is_legal(with_variant(shape, _ANY)):
                    yield shape

    def orders(self, shape: Config) -> Iterator[Config]:
        """Yield the configurations of a shape by schedule, of those that it fills."""
        for variant in self._variants(shape):
            scheduled = with_variant(shape, variant)
            try:
                check_filling(scheduled)
            except ConfigError as error:
                self.refusals[str(error)] = None
            else:
                yield scheduled

    def schedules(self, shape: Config) -> Iterator[Config]:
        """Yield the configurations of a shape by schedule, and by what is of some layers alone."""
        for scheduled in self.orders(shape):
            parallel = scheduled.parallel
            family = find_family(parallel.schedule)
            stages = parallel.pp * (parallel.virtual_stages or family.stages)
            most = shape.model.pipeline_layers // stages
            counts = dict.fromkeys((0, self.config.train.offload_layers, -(-most // 2), most))
            if shape.train.remat == "ahead":
                counts = dict.fromkeys((0,))  # it excludes offloading
            for recomputed in self.recomputed(shape, -(-shape.model.pipeline_layers // stages)):
                for count in self._choose("train.offload_layers", (0,) if recomputed else counts):
                    some = dict(remat_layers=recomputed, offload_layers=count)
                    yield _with(scheduled, train=some)

    def recomputed(self, shape: Config, longest: int) -> Iterable[int]:
        """Choose the layers of which B recomputes everything, of at most `longest` in a stage."""
        counts = dict.fromkeys((0, self.config.train.remat_layers))
        if shape.train.remat == "selective":  # "none" stores hardly more
            counts |= dict.fromkeys((-(-longest // 4), -(-longest // 2)))
        most = 0 if shape.train.remat in ("full", "ahead") else longest - 1
        return self._choose("train.remat_layers", [count for count in counts if count <= most])

    def halves(self, scheduled: Config) -> Iterator[Config]:
        """Yield a schedule as it is, and with layers in halves if they have collectives."""
        parallel = scheduled.parallel
        choices = (False, True) if max(parallel.tp, parallel.ep) > 1 else (False,)
        for halves in self._choose("parallel.overlap_halves", choices):
            yield _with(scheduled, parallel=dict(overlap_halves=halves))

    def storages(self, scheduled: Config) -> Iterator[Config]:
        """Yield the configurations of a schedule by ZeRO stage, groups, and where moments are."""
        own, parallel = self.config.train.offload_moments, scheduled.parallel
        hosts = max(1, parallel.dp * parallel.tp // self._host)  # that replicas are on
        groups = dict.fromkeys((1, self._own.dp_replicate, hosts))
        shared = lcm(parallel.cp, parallel.ep_replicas)
        for stage in self._choose("parallel.zero_stage", (0, 1, 2, 3)):
            for number in self._choose("parallel.dp_replicate", groups):
                if number > 1 and (stage == 0 or parallel.dp % (number * shared)):
                    continue
                how = dict(zero_stage=stage, dp_replicate=number)
                for away in self._choose(
                    "train.offload_moments", dict.fromkeys((own, False, True))
                ):
                    yield _with(scheduled, parallel=how, train=dict(offload_moments=away))

    @staticmethod
    def stored_as(config: Config, other: Config) -> Config:
        """The configuration with the state stored as in another."""
        return _with(
            config,
            parallel=dict(
                zero_stage=other.parallel.zero_stage, dp_replicate=other.parallel.dp_replicate
            ),
            train=dict(offload_moments=other.train.offload_moments),
        )

    def with_loop(self, plan: RunPlan) -> RunPlan | None:
        """The plan, with its layers unrolled if it excludes their loop; None if that is fixed."""
        if "parallel.unroll_layers" not in self._fixed:
            return unroll_if_needed(plan)
        try:
            _ = plan.unroll_layers
        except ConfigError as error:
            self.refusals[str(error)] = None
            return None
        return plan

    def is_legal(self, config: Config) -> bool:
        """Whether a configuration keeps the rules of settings and sizes; else says why not."""
        try:
            check_settings(config)
            resolve_sizes(config, self.devices)
        except ConfigError as error:
            self.refusals[str(error)] = None
            return False
        return True

    def _choose(self, name: str, values: Iterable[Any]) -> Iterable[Any]:
        section, key = name.split(".")
        return [getattr(getattr(self.config, section), key)] if name in self._fixed else values

    def _sequence_shards(self, dp: int) -> list[int]:
        longest = max(self.config.train.seq_len // _SHARD, self._own.cp)
        return [cp for cp in _divisors(dp) if cp <= longest]

    def _shared_experts(self, dp: int, tp: int) -> Iterator[dict[str, int]]:
        """Yield how devices may share the experts of a layer."""
        experts = self.config.model.routed_experts
        choices = (False, True) if tp > 1 and experts else (False,)
        for over_tp in self._choose("parallel.ep_over_tp", choices):
            shards = [size * tp if over_tp else size for size in _divisors(dp)]
            shards = [ep for ep in shards if ep == 1 or (experts and experts % ep == 0)]
            for ep in self._choose("parallel.ep", shards):
                yield dict(ep=ep, ep_over_tp=over_tp)

    def _shared(self, sizes: dict[str, int]) -> Iterator[Config]:
        """Yield the configurations of a mesh by how streams, embedding and head are shared."""
        own, alone = self._own, sizes["pp"] == 1
        streams = dict.fromkeys((True, own.sequence_parallel)) if sizes["tp"] > 1 else [False]
        streams = [True] if sizes["ep_over_tp"] else streams
        vocabulary: Iterable[bool] = [False] if alone or own.defer_embed_head else [False, True]
        if own.vocab_parallel_pp != "auto":
            vocabulary = self._choose("parallel.vocab_parallel_pp", vocabulary)
        heads = {"cp_heads": own.cp_heads if sizes["cp"] == own.cp else 1}
        if "parallel.cp_heads" in self._fixed:
            heads = {}
        if "parallel.dp_replicate" not in self._fixed:
            heads["dp_replicate"] = 1  # of a schedule, `storages` has others
        if "parallel.overlap_halves" not in self._fixed:
            heads["overlap_halves"] = False  # of a schedule, `halves` has both
        for stream in self._choose("parallel.sequence_parallel", streams):
            for shared in vocabulary:
                how = {"sequence_parallel": stream, "vocab_parallel_pp": shared}
                yield _with(self.config, parallel=sizes | heads | how)

    def _keeps_split(self, shape: Config, variant: ScheduleVariant) -> bool:
        """Whether a variant has the stages of `parallel.layer_split`, if that is fixed."""
        if "parallel.layer_split" not in self._fixed:
            return True
        return with_variant(shape, variant).parallel.layer_split == shape.parallel.layer_split

    def _variants(self, shape: Config) -> Iterator[ScheduleVariant]:
        """Yield the variants of schedules that leave fixed settings as they are."""
        own, *others = variants(shape)
        names = {"schedule": lambda one: one.family} | {
            key: lambda one, key=key: getattr(one, key) or find_family(one.family).options.get(key)
            for key in ("virtual_stages", "memory_limit", "in_flight", "breadth")
        }
        fixed: list[Callable[[ScheduleVariant], Any]] = [
            of for key, of in names.items() if f"parallel.{key}" in self._fixed
        ]
        if self._keeps_split(shape, own):
            yield own
        for one in others:
            if not self._keeps_split(shape, one):
                continue
            # A search of a schedule takes as long as a hundred simulations.
            affordable = one.family == own.family or not find_family(one.family).is_searched
            if affordable and all(of(one) == of(own) for of in fixed):
                yield one


def _with(config: Config, **sections: dict[str, Any]) -> Config:
    """The configuration with other settings in some sections."""
    changed = {
        name: structs.replace(getattr(config, name), **settings)
        for name, settings in sections.items()
    }
    return structs.replace(config, **changed)


def _tokens_of(config: Config, devices: int) -> int:
    """Tokens of a step of a configuration, with all devices if it does not say how many."""
    parallel = config.parallel
    if parallel.dp == -1:
        check_count(config, devices)
        dp = devices // (parallel.pp * parallel.tp)
        config = _with(config, parallel=dict(dp=dp))
    return config.tokens_per_step


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]
