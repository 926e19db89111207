"""The results of a search: a table for people, plain types for programs, a configuration file."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import tomli_w
from rich.console import JustifyMethod
from rich.table import Table

from jaxpipe.config import Config, ConfigError
from jaxpipe.config.reading import read_tree
from jaxpipe.core.schedule import Op, simulate
from jaxpipe.lab.search.layout_search import LayoutSearch
from jaxpipe.lab.search.result import SearchResult
from jaxpipe.lab.search.space import SEARCHED
from jaxpipe.planning.cost.estimate import Estimate
from jaxpipe.planning.cost.seconds import NO_COPIES, NO_EXCHANGE

_CLEAR = 0.0005  # of a step: what is printed as 0.1 %
_GIB = 2**30
_COLUMNS: dict[str, JustifyMethod] = {
    "mesh": "left", "microbatches": "right", "remat": "left", "ZeRO": "right", "offloaded": "left",
    "schedule": "left", "head": "left", "GiB": "right", "seconds": "right",
    "compute": "right", "bubble": "right", "messages": "right", "tp": "right", "ep, cp": "right",
    "host": "right", "dp": "right", "tokens/s/device": "right",
}  # fmt: skip
LEGEND = (
    "mesh: sp is sequence parallelism, halves overlap_halves. microbatches: of a step x sequences "
    "of a replica. offloaded: to the host. head: embedding and head of the end stages (own), or of "
    "all ranks (shared). GiB: of a device. Shares of the step's seconds: compute; bubble, idle "
    "ranks; messages between ranks; tp and ep, cp, their collectives; host, its copies; dp, "
    "gradients and parameters between replicas."
)


def time_parts(one: Estimate) -> dict[str, float]:
    """Return the seconds of a step by purpose; their sum is the step.

    `compute` is the mean of the pipeline ranks, and so is `tp`; the remainder is `bubble`.
    """
    plan, seconds = one.plan, one.plan.seconds
    alone = msgspec.structs.replace(
        seconds, copies=NO_COPIES, exchange=NO_EXCHANGE, sharing=NO_EXCHANGE, tensor=NO_EXCHANGE,
        transfer=0.0,
    )  # fmt: skip
    costs = replace(plan, seconds=alone).costs
    forwards = plan.schedule.microbatches
    each = forwards / plan.schedule.pp
    computed = sum(sum(costs.by_stage(op, plan.schedule.stages)) for op in (Op.F, Op.B, Op.W))
    tensor = seconds.tensor
    at_once = replace(plan, seconds=msgspec.structs.replace(seconds, transfer=0.0))
    sent = one.report.scan_makespan
    sent -= simulate(plan.schedule, at_once.costs, plan.lockstep).scan_makespan
    parts = {
        "compute": each * computed,
        "messages": sent + one.mirroring,
        "tp": each * sum(plan.layers) * (tensor.F + tensor.whole_backward),
        "ep, cp": one.exposed,
        "host": one.waiting,
        "dp": one.update,
    }
    return parts | {"bubble": one.seconds - sum(parts.values())}


def search_table(estimates: Sequence[Estimate]) -> Table:
    """Return a table of the results, with the share of the step that every part takes."""
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for name, justify in _COLUMNS.items():
        table.add_column(name, justify=justify, no_wrap=True)
    for estimate in estimates:
        config, parts = estimate.plan.config, time_parts(estimate)
        parallel, train = config.parallel, config.train
        cells = {name: f"{part / estimate.seconds:z.1%}" for name, part in parts.items()}
        layers = f"{train.offload_layers} layers" if train.offload_layers else ""
        recomputed = train.remat_layers
        cells |= {
            "mesh": _mesh(config),
            "microbatches": f"{train.grad_accum_steps} x {train.microbatch_size}",
            "remat": train.remat + (f", full in {recomputed}" if recomputed else ""),
            "ZeRO": str(parallel.zero_stage),
            "offloaded": ", ".join(filter(None, (layers, "moments" * train.offload_moments))),
            "schedule": estimate.label,
            "head": "shared" if parallel.vocab_shared_by else "own",
            "GiB": f"{estimate.bytes.total / _GIB:.1f}",
            "seconds": f"{estimate.seconds:.4g}",
            "tokens/s/device": f"{estimate.tokens_per_second / parallel.devices:,.0f}",
        }
        table.add_row(*(cells[name] for name in _COLUMNS))
    return table


def _mesh(config: Config) -> str:
    parallel = config.parallel
    how = " sp" * parallel.sequence_parallel + " halves" * parallel.overlap_halves
    return parallel.mesh + how


def explain_winner(fastest: Estimate, second: Estimate) -> str:
    """Return what the fastest gains over the second, and by which parts of the step."""
    name, gain = f"{_mesh(second.plan.config)} {second.label}", second.seconds / fastest.seconds - 1
    if gain < _CLEAR:
        return f"as fast as {name}"
    own, other = map(time_parts, (fastest, second))
    less = {part: (other[part] - own[part]) / second.seconds for part in own}
    won, lost = max(less, key=lambda part: less[part]), min(less, key=lambda part: less[part])
    because = f"{won} takes {less[won]:.1%} of its step less"
    if less[lost] < -_CLEAR:
        because += f", {lost} {-less[lost]:.1%} more"
    return f"{gain:.1%} faster than {name}: {because}"


def search_as_json(estimates: Sequence[Estimate], result: SearchResult) -> dict[str, Any]:
    """The results in plain types."""
    return {
        "candidates": result.candidates,
        "simulated": result.simulated,
        "best": [
            {
                "settings": searched_settings(estimate.plan.config),
                "seconds": estimate.seconds,
                "tokens_per_second": estimate.tokens_per_second,
                "parts": time_parts(estimate),
                "bytes": asdict(estimate.bytes) | {"total": estimate.bytes.total},
            }
            for estimate in estimates
        ],
    }


def searched_settings(config: Config) -> dict[str, dict[str, Any]]:
    """The searched settings of a configuration, by section."""
    return {
        name: {key: msgspec.to_builtins(getattr(getattr(config, name), key)) for key in keys}
        for name, keys in SEARCHED.items()
    }


def write_config(
    config: Config, path: Path, *, source: str | Path, overrides: Sequence[str]
) -> None:
    """Write the file that a search began with, with overrides and what was found, as TOML."""
    tree = read_tree(source, overrides)
    tree.get("runtime", {}).pop("cpu_devices", None)
    for name, settings in searched_settings(config).items():
        defaults = {
            field.name: field.default for field in msgspec.structs.fields(getattr(config, name))
        }
        section = {key: value for key, value in tree.get(name, {}).items() if key not in settings}
        changed = {key: value for key, value in settings.items() if value != defaults[key]}
        tree[name] = section | changed
    try:
        path.write_text(tomli_w.dumps(tree))
    except OSError as error:
        raise ConfigError(f"--write {path} cannot be written ({error.strerror}).") from error


def nothing_found(search: LayoutSearch, result: SearchResult) -> str:
    """The sentence that says why a search has no result, and what to change."""
    space = search.space
    if result.least is None:
        if space.refusals:
            return next(iter(space.refusals))
        return (
            f"no mesh of {space.devices} devices has {', '.join(space.fixed) or 'a stage a rank'}: "
            f"pp x dp x tp is the number of devices; change one of them."
        )
    size, config = result.least
    parallel, train = config.parallel, config.train
    return (
        f"nothing fits the {search.usable / _GIB:.1f} GiB of a device that a plan fills: the "
        f"least need found is {size / _GIB:.1f} GiB or more, with {parallel.mesh}, "
        f"parallel.zero_stage={parallel.zero_stage}, train.microbatch_size="
        f"{train.microbatch_size}, train.remat={train.remat}, train.offload_layers="
        f"{train.offload_layers} and train.offload_moments={str(train.offload_moments).lower()}; "
        f"use more or larger devices, or free a setting that is fixed."
    )
