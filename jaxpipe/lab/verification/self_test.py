"""Faults planted one by one, to show that the comparison notices each."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
from msgspec import structs

from jaxpipe.config import Config
from jaxpipe.lab.verification.faults import FAULTS, Fault
from jaxpipe.lab.verification.observed import Deviation, Observed, compare
from jaxpipe.lab.verification.steps import Float64Trainer
from jaxpipe.lab.verification.verifying import Verification
from jaxpipe.training.state import State

Say = Callable[[str], None]


def plant_all(config: Config, say: Say) -> Iterator[tuple[str, Deviation]]:
    """Yield every fault that applies to a smaller run, and the largest error that it causes."""
    run = Verification(config, say)
    faults = tuple(fault for fault in FAULTS if fault.applies(run.trainer))
    for number, fault in enumerate(faults, 1):
        begin = time.perf_counter()
        worst = plant(run, fault)
        seconds = time.perf_counter() - begin
        say(f"{seconds:6.1f} s  {number} of {len(faults)}: {fault.name}: {worst.error:.1e}")
        yield fault.name, worst


def plant(run: Verification, fault: Fault) -> Deviation:
    """The largest error that a fault causes."""
    if fault.restored:
        got, want = run.second(fault.restored(run.restored)), run.want[1]
    elif fault.second:
        trainer = run.trainer
        state = _on_mesh(trainer, fault.second(run.begin, run.first[0]))
        batch = trainer.put(run.batches[1], trainer.samples_per_step)
        got, want = trainer.observe(state, batch)[1], run.want[1]
    else:
        got, want = _first_step(run, fault), run.want[0]
    return max(compare(got, want), key=lambda deviation: deviation.error)


def _first_step(run: Verification, fault: Fault) -> Observed:
    trainer, config = run.trainer, run.config
    if fault.settings:
        section, changes = fault.settings(config)
        section_now = structs.replace(getattr(config, section), **changes)
        trainer = Float64Trainer.of(structs.replace(config, **{section: section_now}))
    if fault.functions or fault.tables or fault.run:
        trainer = replace(
            trainer, alter=fault.functions, alter_tables=fault.tables, alter_run=fault.run
        )
    state, batch = run.begin, trainer.put(run.batches[0], 0)
    if fault.batch:
        batch = jax.device_put(fault.batch(batch, trainer), trainer.sharder.sharding)
    if fault.state:
        state = _on_mesh(trainer, fault.state(state))
    return trainer.observe(state, batch)[1]


def _on_mesh(trainer: Float64Trainer, state: State) -> Any:
    """The state with the shardings of a trainer's states."""
    return jax.device_put(state, trainer.state_shardings)
