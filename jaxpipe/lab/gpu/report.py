"""A check's report as JSON and as text."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby
from typing import Any

from jaxpipe.config.units import readable_bytes
from jaxpipe.lab.gpu.check import CompiledReport
from jaxpipe.lab.gpu.collectives import CollectiveShare
from jaxpipe.lab.gpu.products import ProductCount
from jaxpipe.lab.gpu.program import shape_bytes
from jaxpipe.planning.limits import PLANNED_SHARE

_LISTED = 12  # temporaries in `--json`
_SHOWN = 4  # kinds of temporaries in the text


def report_as_json(report: CompiledReport) -> dict[str, Any]:
    """Return the report as JSON values; sizes are in bytes, times in seconds."""
    program, hides = report.program, report.program.host_copies
    waits = program.permutes.count(None)
    return {
        "card": report.card,
        "devices": report.devices,
        "topology": report.topology,
        "memory": report.memory,
        "usable": report.usable,
        "fits": report.fits,
        "with_room": report.with_room and asdict(report.with_room),
        "ran_short": report.ran_short,
        "bytes": asdict(report.bytes),
        "permutes": {
            "asynchronous": len(program.permutes) - waits,
            "synchronous": waits,
            "ticks": program.ticks,
            "conditionals": program.conditionals,
            "hides": list(program.permutes),
            "hidden": program.hidden,
            "permute_phases": report.phases,
        },
        "host_copies": {
            "asynchronous": len(hides) - hides.count(None),
            "synchronous": hides.count(None),
            "hidden": sum(map(bool, hides)),
        },
        "buffer_copies": [one._asdict() for one in program.buffer_copies],
        "message_copies": [one._asdict() for one in program.message_copies],
        "custom_calls": program.custom_calls,
        "products": [one._asdict() for one in report.products],
        "collectives": [one._asdict() for one in report.collectives.shares],
        "temporaries": [one._asdict() for one in report.temporaries[:_LISTED]],
        "seconds": {
            **report.ops._asdict(),
            "step": report.step[0],
            "step_by_plan": report.step[1],
        },
        "graphs": report.graphs and report.graphs._asdict(),
        "compile_seconds": report.seconds,
        "note": report.note,
        "dropped_options": list(report.dropped),
    }


def report_lines(report: CompiledReport) -> list[str]:
    """Return the report as text, one fact per line."""
    size, program = report.bytes, report.program
    memory, usable = map(readable_bytes, (report.memory, report.usable))
    peak, arguments, temporaries, outputs, aliased = map(
        readable_bytes,
        (size.peak, size.arguments, size.temporaries, size.outputs, size.aliased),
    )
    return [
        f"{report.devices} x {report.card} ({report.topology}): compiled in "
        f"{report.seconds:.0f} s for a device that is not there; nothing was run",
        f"memory: peak {peak} of the {usable} that jax takes of {memory}: "
        f"{'fits' if report.fits else 'DOES NOT FIT'} (arguments {arguments}, temporaries "
        f"{temporaries}, outputs {outputs} of which {aliased} in place of arguments; without "
        f"CUDA's context and NCCL's buffers)",
        *_advice(report),
        *_with_room(report),
        _permutes(report),
        *_host(report),
        "copies in the loop: " + (
            ", ".join(f"{one.count} x {one.shape}" for one in program.buffer_copies)
            or "none of a ring or an accumulator"
        ) + f"; {sum(one.count for one in program.message_copies)} of a message",
        f"library calls: {_counts(program.custom_calls)}",
        _products(report.products),
        *(_collectives(report.collectives.shares) or ["collectives: none"]),
        _graphs(report),
        _temporaries(report),
        _seconds(report),
        *([report.note] if report.note else []),
        *(f"option {sentence}" for sentence in report.dropped),
    ]  # fmt: skip


def _advice(report: CompiledReport) -> list[str]:
    if report.fits or report.bytes.peak > report.memory:
        return []
    share = report.usable / report.memory
    return [
        f"jax takes {share:.0%} of the memory: set XLA_PYTHON_CLIENT_MEM_FRACTION above "
        f"{report.bytes.peak / report.memory:.2f}, here and for the run"
    ]


def _with_room(report: CompiledReport) -> list[str]:
    """Format what the step needs where memory is not short, and what the shortage costs."""
    if report.with_room is None:
        return []
    needed = readable_bytes(report.with_room.peak)
    lines = [f"on a card of the kind with more memory the step takes {needed}"]
    if report.ran_short:
        lines.append(
            f"XLA ran out of memory while scheduling: {report.collectives.hidden_in_loop:.0%} of "
            f"the bytes of collectives in the loop are behind compute, with more memory "
            f"{report.with_room.hidden:.0%}: lower train.microbatch_size, or raise "
            f"train.remat_layers, until the plan takes at most "
            f"{readable_bytes(report.usable * PLANNED_SHARE)}"
        )
    return lines


def _permutes(report: CompiledReport) -> str:
    program = report.program
    waits = program.permutes.count(None)
    hides = ", ".join(str(hides) for hides in program.permutes if hides is not None)
    if report.phases > 1:
        return (
            f"permutes: {waits} synchronous, one for each of {report.phases} phases: ranks wait "
            f"for one neighbour at a time"
        )
    return (
        f"permutes: {len(program.permutes) - waits} asynchronous, behind {hides or 'no'} of the "
        f"{program.conditionals} conditionals of a tick, {waits} synchronous: "
        f"{'all hidden' if program.hidden else 'NOT ALL HIDDEN'}"
    )


def _products(products: Iterable[ProductCount]) -> str:
    """Format the number of matrix products by action and dtypes, and of those outside layers."""
    of_ops = [
        f"{op or 'outside layers'} "
        + ", ".join(f"{one.count} {one.operands} by {one.library}" for one in of)
        for op, of in groupby(products, lambda one: one.op)
    ]
    return f"products: {'; '.join(of_ops) or 'none'}"


def _collectives(shares: Iterable[CollectiveShare]) -> list[str]:
    """Format a line per kind and place: count and bytes by mesh axes, and share behind compute."""
    return [
        f"{kind} {'in the loop' if looped else 'outside it'}: "
        + "; ".join(
            f"{one.count} over {' '.join(one.axes) or 'none'}, {readable_bytes(one.size)}, "
            f"{one.hidden / max(1, one.size):.0%} behind compute{_actions(one)}"
            for one in of
        )
        for (looped, kind), of in groupby(shares, lambda one: (one.looped, one.kind))
    ]


def _actions(share: CollectiveShare) -> str:
    """Format the share behind compute by action, where there are several actions."""
    if len(share.actions) < 2:
        return ""
    by = (f"{name} {hidden / size:.0%}" for name, (size, hidden) in share.actions.items())
    return f" ({', '.join(by)})"


def _host(report: CompiledReport) -> list[str]:
    hides = report.program.host_copies
    if not report.bytes.host:
        return []
    return [
        f"host: {readable_bytes(report.bytes.host)} of its memory; {len(hides)} copies to and fro "
        f"in the loop, {sum(map(bool, hides))} of them behind products, {hides.count(None)} "
        f"synchronous"
    ]


def _graphs(report: CompiledReport) -> str:
    graphs = report.graphs
    if graphs is None:
        return "CUDA graphs: no loop was found in what the host launches"
    if graphs.whole:
        return "CUDA graphs: a tick is one graph"
    return (
        f"CUDA graphs: an iteration of the loop launches {_counts(graphs.launches)}; the host "
        f"waits for {graphs.stops} conditionals"
    )


def _temporaries(report: CompiledReport) -> str:
    """Format the largest temporaries, grouped by shape and source line."""
    alike: Counter[tuple[str, str]] = Counter()
    for one in report.temporaries[:_LISTED]:
        alike[one.shape, one.line] += 1
    temporaries = (
        f"{count} x {shape} ({readable_bytes(count * shape_bytes(shape))}, {line or 'no line'})"
        for (shape, line), count in list(alike.items())[:_SHOWN]
    )
    return f"largest temporaries at the peak: {', '.join(temporaries) or 'unknown'}"


def _seconds(report: CompiledReport) -> str:
    ops, (step, planned) = report.ops, report.step
    actions = ", ".join(f"{name} {1e3 * each:.3g}" for name, each in sorted(ops.actions.items()))
    return (
        f"time: a step takes {planned:.3g} s by plan, at half of the peak"
        + (f", {step:.3g} s by its instructions at all of it, collectives free" if step else "")
        + f" (ms of a device's layers: {actions or 'none'}; embedding and head "
        f"{1e3 * ops.embed_head:.3g}, outside the loop {1e3 * ops.outside:.3g})"
    )


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
