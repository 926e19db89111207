"""Faults of a run, each planted through one seam: its settings, program, batch or state."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxpipe.lab.verification import wrong_functions as wrong
from jaxpipe.lab.verification import wrong_values as values
from jaxpipe.lab.verification.steps import Alter, AlterRun, AlterTables, Float64Trainer
from jaxpipe.lab.verification.wrong_loops import has_loop, run_forward
from jaxpipe.lab.verification.wrong_tables import can_swap_in, swap_in
from jaxpipe.training.state import State

Tree = Any
Applies = Callable[[Float64Trainer], bool]


@dataclass(frozen=True)
class Fault:
    """What goes wrong on the mesh, while the reference stays as it is.

    Attributes:
      name: what is wrong.
      applies: `trainer -> bool`, whether the run has what goes wrong.
      settings: `config -> (section, {key: value})`, other settings of the run.
      functions: other functions of the model.
      tables: other tables of the schedule.
      run: another run of layers in the place of each.
      batch: `(batch on the devices, trainer) -> batch`.
      state: `(state before the first step) -> state`.
      second: `(state before the first step, state after it) -> state` of the second step.
      restored: `(restored state) -> state` of the second step, on the other mesh.
    """

    name: str
    applies: Applies = lambda trainer: True
    settings: Callable[[Any], tuple[str, dict[str, Any]]] | None = None
    functions: Alter | None = None
    tables: AlterTables | None = None
    run: AlterRun | None = None
    batch: Callable[[Tree, Float64Trainer], Tree] | None = None
    state: Callable[[State], State] | None = None
    second: Callable[[State, State], State] | None = None
    restored: Callable[[State], State] | None = None


def _parallel(**least: int) -> Applies:
    """Whether settings of `[parallel]` are above these."""
    return lambda trainer: all(
        getattr(trainer.config.parallel, name) > size for name, size in least.items()
    )


def _set(section: str, *names: str) -> Applies:
    """Whether any of these settings is there and not 0."""
    return lambda trainer: any(getattr(getattr(trainer.config, section), name, 0) for name in names)


def _all_of(*conditions: Applies) -> Applies:
    return lambda trainer: all(condition(trainer) for condition in conditions)


def _several_microbatches(trainer: Float64Trainer) -> bool:
    return trainer.config.train.grad_accum_steps > 1


def _trains_model(trainer: Float64Trainer) -> bool:
    """Whether the model's own parameters are trained, not adapters."""
    return not trainer.config.lora.rank


def _updates(trainer: Float64Trainer) -> bool:
    return not trainer.config.debug.skip_update


def _reads_scale(trainer: Float64Trainer) -> bool:
    """Whether updates depend on the scale of gradients."""
    return trainer.config.optimizer.name not in ("adafactor", "lion")


def _reads_count(trainer: Float64Trainer) -> bool:
    """Whether updates depend on the number of updates before."""
    config = trainer.config.optimizer
    is_constant = config.decay == "constant" and not config.warmup_steps
    return not (is_constant and config.name in ("lion", "sgd"))


def _has_key(name: str) -> Applies:
    """Whether batches have an array of this name."""
    return lambda trainer: name in trainer.sharder.leaves


def _swapped(name: str, column: str) -> Fault:
    """The fault that two entries of a column of the tables are swapped."""
    return Fault(
        name,
        lambda trainer: can_swap_in(column, trainer.pipeline.tables),
        tables=swap_in(column),
    )


FAULTS = (
    # the batch
    Fault("two microbatches are swapped", _several_microbatches, batch=values.swap_microbatches),
    Fault("a row's targets are ignored", batch=values.ignore_row),
    Fault("positions of a microbatch are shifted", batch=values.shift_positions),
    Fault("segments of packed rows are dropped", _has_key("segments"), batch=values.join_documents),
    Fault("padding goes to experts", _has_key("real"), batch=values.unmark_padding),
    Fault("tokens further ahead are late", _has_key("inputs_ahead_1"), batch=values.delay_ahead),
    Fault("sequence shards are swapped", _parallel(cp=1), batch=values.swap_shards),
    Fault("slices are out of order", _parallel(slices=1), batch=values.swap_slices),
    # the state
    Fault("two layers are swapped", values.can_swap_layers, state=values.swap_layers),
    Fault(
        "variables are left out", lambda trainer: bool(trainer.model.functions.variables),
        state=values.zero_variables,
    ),
    Fault("a stage reads stale parameters", _updates, second=values.make_stage_stale),
    Fault("moments are not restored", _updates, restored=values.forget_moments),
    Fault(
        "updates are counted anew after a restore", _all_of(_updates, _reads_count),
        restored=values.forget_counts,
    ),
    # settings
    Fault(
        "half the learning rate", _updates,
        settings=lambda c: ("optimizer", {"lr": c.optimizer.lr / 2}),
    ),
    Fault(
        "norms decay like matrices",
        _all_of(_updates, _trains_model, _set("optimizer", "weight_decay")),
        settings=lambda c: ("optimizer", {"decay_of_vectors": c.optimizer.decay_of_vectors + 1}),
    ),
    Fault(
        "gradients are clipped at twice the norm",
        _all_of(_updates, _reads_scale, _set("optimizer", "clip_norm")),
        settings=lambda c: ("optimizer", {"clip_norm": 2 * c.optimizer.clip_norm}),
    ),
    Fault(
        "positions rotate by another base", _set("model", "rope_theta"),
        settings=lambda c: ("model", {"rope_theta": c.model.rope_theta / 2}),
    ),
    Fault(
        "the window is one token wider", _set("model", "sliding_window"),
        settings=lambda c: ("model", {"sliding_window": c.model.sliding_window + 1}),
    ),
    Fault(
        "router losses count twice", _set("model", "router_aux_loss"),
        settings=lambda c: ("model", {"router_aux_loss": 2 * c.model.router_aux_loss}),
    ),
    Fault("masks are drawn with another seed", _has_key("samples"),
          settings=lambda c: ("train", {"seed": c.train.seed + 1})),
    Fault(
        "the z-loss counts twice", _set("train", "z_loss"),
        settings=lambda c: ("train", {"z_loss": 2 * c.train.z_loss}),
    ),
    # the tables
    _swapped("F reads another microbatch's input", "x_read"),
    _swapped("F reads another microbatch's tokens", "forward_mb"),
    _swapped("B reads another microbatch's output gradient", "dy_read"),
    _swapped("B reads another microbatch's residuals", "for_b_read"),
    _swapped("W reads another microbatch's residuals", "for_w_read"),
    _swapped("W reads another microbatch's stash", "stash_read"),
    _swapped("R reads another microbatch's input", "for_r_read"),
    # loops over layers
    Fault("B runs the layers of a loop first to last", has_loop, run=run_forward),
    # functions of the model
    Fault(
        "losses are divided by the number of microbatches", _several_microbatches,
        functions=wrong.divide_losses,
    ),
    Fault("ignored targets are counted", functions=wrong.count_ignored),
    Fault("the head's gradient is dropped", _trains_model, functions=wrong.stop_head),
    Fault(
        "the embedding's gradient is dropped", _trains_model, functions=wrong.stop_embedding,
    ),
    Fault("a replica's gradients are not reduced", _parallel(dp=1), functions=wrong.drop_replica),
    Fault(
        "gradients of embedding and head are not reduced over pp",
        _all_of(_trains_model, wrong.has_embed_head_over_pp),
        functions=wrong.keep_embed_head_partial,
    ),
    Fault(
        "a norm's gradient is not reduced over tp",
        _all_of(_trains_model, _set("parallel", "sequence_parallel")),
        functions=wrong.keep_norms_partial,
    ),
    Fault(
        "experts' gradients are scaled by ep", _all_of(_trains_model, _parallel(ep=1)),
        functions=wrong.scale_experts,
    ),
    Fault(
        "the router's gradient is dropped", _all_of(_trains_model, _set("model", "n_experts")),
        functions=wrong.stop_router,
    ),
    Fault("keys of earlier slices are not read", _parallel(slices=1),
          functions=wrong.forget_slices),
)  # fmt: skip
