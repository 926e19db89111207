"""`python -m jaxpipe.plan CONFIG [section.key=value ...]`: choose a schedule without any device.

Prints every schedule that the configuration allows with its bubble, memory and predicted speed, and
recommends the fastest that fits in memory.

With `--check-gpu h100` it instead compiles the training step for the configuration's GPUs, without
having one, and reports whether the step fits and which communication overlaps with compute. With
`--save DIR` it also writes the compiled step, which a run with `runtime.programs=DIR` loads.

With `--search --devices N` it instead searches for the fastest mesh, schedule and memory settings
on N devices for the configuration's tokens a step; overrides stay as they are, and `--write
FILE.toml` writes the fastest. With `--check-gpu` too, the best three are compiled.

Alone, `--rules` prints the rules across settings, `--settings` every setting with its meaning and
rules, and `--published` what others measured beside what is planned for their layouts.

Exit codes: 0 done; 2 bad input. With `--check-gpu`: 0 it fits; 1 it does not; 2 bad input, or no
compiler for GPUs.
"""

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from jaxpipe import config as configs
from jaxpipe.config import Config, ConfigError
from jaxpipe.config.arguments import parse, parser_of, string_override
from jaxpipe.config.paths import local_path
from jaxpipe.config.units import parse_bytes
from jaxpipe.core.schedule import write_schedule
from jaxpipe.data.packing_estimate import describe_packing, estimate_packing
from jaxpipe.lab.gpu.cards import CARDS, parse_cards
from jaxpipe.lab.search.command import check_arguments, search_layouts
from jaxpipe.lab.search.table import LEGEND, search_as_json, search_table, write_config
from jaxpipe.planning import (
    Devices,
    Estimate,
    Hardware,
    Plan,
    advise,
    estimates,
    op_seconds,
    overlapped,
)
from jaxpipe.planning.cost.machine import machine, machine_of
from jaxpipe.planning.limits import planned_bytes
from jaxpipe.planning.page import write_plan_page
from jaxpipe.planning.progress import PlanProgress
from jaxpipe.planning.rules.across import check_settings
from jaxpipe.planning.rules.listing import rules_table
from jaxpipe.planning.rules.reference import settings_page
from jaxpipe.planning.rules.sizes import resolve_sizes
from jaxpipe.planning.settings import changed, words_of
from jaxpipe.runtime import command
from jaxpipe.runtime.devices import DEVICES
from jaxpipe.runtime.exit_code import ExitCode
from jaxpipe.schedules import draw_timeline, find_family, fuse_steps
from jaxpipe.schedules.timing.figure import draw_figure


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    return command.run(lambda: _run(parse(_parser(), argv)))


def _run(arguments: argparse.Namespace) -> int:
    if arguments.save and (arguments.search or not arguments.check_gpu):
        raise ConfigError("--save writes what --check-gpu compiles without --search: give that.")
    if arguments.search:
        return _search(arguments)
    return _check_gpu(arguments) if arguments.check_gpu else _plan(arguments)


def _share(text: str) -> float:
    if not 0 < (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and at most 1")
    return value


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _device(text: str) -> str:
    """The name of a device in any case."""
    return next((name for name in DEVICES if name.lower() == text.lower()), text)


def _counts(text: str) -> list[int]:
    if not all(map(str.isdecimal, _words(text))):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, or several with commas")
    return [int(word) for word in _words(text)]


def _published() -> str:
    from jaxpipe.planning.published import show

    console = Console(highlight=False, width=250)
    with _no_search_for_cycles(), console.capture() as text:
        show(console)
    return text.get().rstrip()


class _Print(argparse.Action):
    """Print the text that a function returns and exit, as `--help` prints its text and exits."""

    def __init__(self, text: Callable[[], str], **options: Any):
        super().__init__(nargs=0, **options)
        self._text = text

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(self._text())
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("plan", __doc__ or "", example="llama3_8b_pp4")
    add = parser.add_argument
    add("--memory", type=parse_bytes, metavar="80GiB", help="a device's memory (its data sheet's)")
    add("--device", default="H100", type=_device, choices=DEVICES,
        help="a device, in its usual machine, if no --machine is given (H100)")  # fmt: skip
    add("--search", action="store_true", help="search for the fastest settings on --devices N")
    add("--machine", metavar="NAME",
        help="a machine by name (dgx-h100), your own in a .toml file, or the .json file that "
        "`python -m jaxpipe.bench ops --table` writes")  # fmt: skip
    add("--costs", metavar="FILE", help="read op times from FILE (as parallel.costs)")
    add("--lengths", type=local_path, metavar="DIR",
        help="a prepared folder: count its tokens, not the padding of packed rows")  # fmt: skip
    add("--bubble", type=_share, metavar="0.05", help="report what would lower the bubble to this")
    add("--fused-steps", type=int, choices=range(2, 17), metavar="N",
        help="add the time that N overlapping steps save (train.fused_steps)")  # fmt: skip
    add("--show", metavar="SCHEDULE", help="the schedule to draw and write (the recommended one)")
    add("--timeline", action="store_true", help="print the schedule's timeline")
    add("--picture", type=local_path, metavar="FILE",
        help="draw the schedule: .svg, .pdf, .png or .html")  # fmt: skip
    add("--html", type=local_path, metavar="FILE", help="write the plan as an interactive page")
    add("--write", type=local_path, metavar="FILE",
        help="write the schedule (.csv, .json), or with --search the fastest configuration "
        "(.toml)")  # fmt: skip
    add("--check-gpu", type=parse_cards, metavar="CARD[,...]",
        help=f"compile the step for these GPUs: {', '.join(CARDS)}")  # fmt: skip
    add("--save", type=local_path, metavar="DIR", help="write the compiled step to DIR")
    add("--devices", type=_counts, metavar="N[,...]",
        help="number of devices, also for dp=-1; several only with --check-gpu")  # fmt: skip
    add("--schedules", type=_words, metavar="NAME[,...]",
        help="schedules besides the configured one, or to compile (--check-gpu)")  # fmt: skip
    add("--json", action="store_true", help="print everything as one JSON object")
    add("--rules", action=_Print, text=rules_table, help="print the rules between settings")
    add("--published", action=_Print, text=_published,
        help="print what others measured beside what is planned for their layouts")  # fmt: skip
    add("--settings", action=_Print, text=settings_page, help="print the page of all settings")
    return parser


@contextmanager
def _no_search_for_cycles() -> Iterator[None]:
    """Pause garbage collection: scanning millions of acyclic tuples takes a sixth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _search(arguments: argparse.Namespace) -> int:
    check_arguments(arguments)
    if arguments.check_gpu:
        _compile_without_device()
    with _no_search_for_cycles():
        found, result, sentence = search_layouts(arguments, _hardware(arguments))
    if arguments.json:
        print(json.dumps(search_as_json(found, result), indent=1))
    else:
        console = Console(highlight=False, width=max(200, Console().width))
        console.print(search_table(found))
        console.print(
            f"{LEGEND} {result.candidates:,} candidates, {result.simulated:,} simulated.",
            style="dim", soft_wrap=True,
        )  # fmt: skip
        console.print(sentence, soft_wrap=True)
    if arguments.check_gpu:
        from jaxpipe.lab.gpu import several

        found, table = several.compile_best(
            found[:3], arguments.check_gpu[0], arguments.devices[0], arguments.memory
        )  # fmt: skip
        Console(highlight=False, width=140, stderr=arguments.json).print(table)
    if arguments.write and found:
        write_config(
            found[0].plan.config, arguments.write,
            source=arguments.config, overrides=arguments.overrides,
        )  # fmt: skip
        print(f"wrote {arguments.write}", file=sys.stderr)
    return ExitCode.DONE if found else ExitCode.FAILED


def _hardware(arguments: argparse.Namespace) -> Hardware:
    """The machine; `arguments.device` becomes the machine's."""
    hardware = machine(arguments.machine) if arguments.machine else machine_of(arguments.device)
    arguments.device = hardware.device
    return hardware


def _plan(arguments: argparse.Namespace) -> int:
    overrides = arguments.overrides
    if arguments.costs:
        overrides = [*overrides, string_override("parallel.costs", arguments.costs)]
    if len(arguments.devices or ()) > 1:
        raise ConfigError("several --devices are for --check-gpu: give one.")
    config = configs.load(arguments.config, overrides)
    check_settings(config)
    config = resolve_sizes(config, (arguments.devices or [None])[0])
    hardware = _hardware(arguments)
    memory = arguments.memory or hardware.sheet.memory
    devices = replace(Devices.planned(config), memory=memory, hardware=hardware.usual)
    try:
        with _no_search_for_cycles():
            seconds = op_seconds(config, hardware)
            found, refused = estimates(
                config, seconds, devices=devices, progress=PlanProgress(),
                families=[find_family(name).name for name in arguments.schedules or ()],
            )  # fmt: skip
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not found:
        raise ConfigError(next(iter(refused.values())))
    rows = None
    if arguments.lengths:
        rows = estimate_packing(arguments.lengths, config.data, config.train.seq_len)
        found = [replace(e, tokens=round(e.tokens * rows.efficiency)) for e in found]
    if steps := arguments.fused_steps:
        found = [overlapped(one, steps) for one in found]
    usable = planned_bytes(memory)
    timed_by = None if arguments.fused_steps else hardware
    advice = advise(config, found, memory=usable, bubble=arguments.bubble, hardware=timed_by)
    if rows and advice.best:
        best = next(one for one in found if one.label == advice.best)
        sentence = describe_packing(config, rows, best, hardware.sheet.flops)
        advice = replace(advice, sentences=(*advice.sentences, sentence))
    plan = Plan(config, tuple(found), refused, advice, seconds, usable)
    shown = _shown(found, arguments.show or advice.best)
    if arguments.json:
        print(json.dumps(plan.as_json(), indent=1))
    else:
        plan.show(Console(highlight=False, width=max(120, Console().width)))
    _draw(config, shown, arguments)
    if arguments.html:
        write_plan_page(plan, arguments.html, Path(arguments.config).stem, shown.label)
        print(f"wrote {arguments.html}: open it in a browser", file=sys.stderr)
    if arguments.write:
        _write(config, shown, arguments.write)
    return ExitCode.DONE


def _draw(config: Config, shown: Estimate, arguments: argparse.Namespace) -> None:
    """Print the timeline of a schedule, and draw its picture, as far as options ask for them."""
    run = shown.plan
    steps = arguments.fused_steps
    if steps and (arguments.timeline or arguments.picture):
        run = replace(run, schedule=fuse_steps(run.schedule, steps))
    if arguments.timeline:
        drawn = draw_timeline(run.schedule, run.lockstep)
        print(drawn, file=sys.stderr if arguments.json else None)
    if arguments.picture:
        with _writing("--picture", arguments.picture):
            source = "measured" if config.parallel.costs else f"estimated for {arguments.device}"
            draw_figure(
                run.schedule, arguments.picture, lockstep=run.lockstep,
                costs=run.costs, source=f"costs {source}",
            )  # fmt: skip
        print(f"drew {shown.label} to {arguments.picture}", file=sys.stderr)


def _compile_without_device() -> None:
    # The GPU compiler needs no device, but its jax plugin fails to start without one. Set these
    # before jax is imported, which a schedule search that needs costs may already do.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's warnings repeat the report


def _check_gpu(arguments: argparse.Namespace) -> int:
    _compile_without_device()
    from jaxpipe.lab.gpu import check, report, several

    every = several.load_requests(
        arguments.config, arguments.overrides, arguments.check_gpu, arguments.devices or (),
        arguments.schedules or (), arguments.memory,
    )  # fmt: skip
    reports = [check.check_step(one.plan, one.card, arguments.save) for one in every]
    as_json = [report.report_as_json(one) for one in reports]
    if arguments.json:
        print(json.dumps(as_json if len(reports) > 1 else as_json[0], indent=1))
    elif len(reports) > 1:
        Console(highlight=False, width=140).print(several.build_table(every, reports))
    else:
        print("\n".join(report.report_lines(reports[0])))
    return ExitCode.DONE if all(one.fits for one in reports) else ExitCode.FAILED


def _shown(rows: Sequence[Estimate], label: str | None) -> Estimate:
    for one in rows:
        if one.label == (label or rows[0].label):
            return one
    raise ConfigError(
        f"--show {label!r} is not in the table: use one of "
        f"{', '.join(repr(e.label) for e in rows)}."
    )


def _write(config: Config, shown: Estimate, path: Path) -> None:
    """Write each rank's order of actions, and print the settings that run it as planned."""
    if path.suffix not in (".csv", ".json"):
        raise ConfigError(f"--write {path}: give a name that ends in .csv or .json.")
    with _writing("--write", path):
        write_schedule(shown.plan.schedule, path)
    named = {"schedule": "custom", "schedule_file": path, "virtual_stages": 0, "breadth": 0}
    lockstep = shown.plan.lockstep
    named |= {"in_flight": lockstep.in_flight or 0, "vocab_parallel_pp": lockstep.vocab_parallel}
    planned = shown.plan.config.parallel
    named |= {key: getattr(planned, key) for key in ("layer_split", "memory_limit")}
    named["unroll_layers"] = planned.unroll_layers
    after = msgspec.structs.replace(
        config, parallel=msgspec.structs.replace(config.parallel, **named)
    )
    how = words_of(changed(config, after, {"parallel": named}))
    print(f"wrote {shown.label}; to run it: {how}", file=sys.stderr)


@contextmanager
def _writing(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be written ({error.strerror}).") from error


if __name__ == "__main__":
    sys.exit(main())
