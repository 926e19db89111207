"""Rules of several steps in one program (`train.fused_steps`)."""

from collections.abc import Iterator

from jaxpipe.config import Config, ConfigError
from jaxpipe.schedules import find_family


def check_fused(config: Config) -> None:
    """Raise `ConfigError` if several steps cannot be one program.

    `train.fused_steps` above 1 excludes, with a schedule whose ranks have stages of both directions
    (dualpipe), `log.bubble_every`, and with any other: `train.spike_sigma`, `debug.skip_update`,
    `debug.print_messages`, a head that is the embedding, `model.mtp_depth`,
    `parallel.vocab_parallel_pp`, `train.compute_dtype='float16'`, `parallel.slices`,
    `parallel.reshard_after_forward`, and optimizers that do not update value by value, but not
    `muon` where devices store full matrices.
    """
    steps = config.train.fused_steps
    if steps == 1:
        return
    for met, why in _unmet(config):
        raise ConfigError(
            f"train.fused_steps={steps} with {met}: {why}; change it, or set train.fused_steps=1."
        )


def _unmet(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the settings that exclude several steps in one program, and why."""
    model, parallel, train = config.model, config.parallel, config.train
    if find_family(parallel.schedule).placement == "both ways":
        if config.log.bubble_every:
            yield f"log.bubble_every={config.log.bubble_every}", "its steps are one after the other"
        return  # its steps run one after the other, each with the usual update
    if train.spike_sigma:
        yield f"train.spike_sigma={train.spike_sigma}", "ranks update before the norm is known"
    if config.debug.skip_update:
        yield "debug.skip_update=true", "ranks update within the program"
    if config.debug.print_messages:
        yield "debug.print_messages=true", "ticks of several steps have no numbers of their own"
    if model.tied:
        yield "a head that is the embedding", "the first stage would wait for the last's gradient"
    if depth := model.tokens_ahead:
        yield (
            f"model.mtp_depth={depth}",
            "ranks whose layers read embedding and head would update them, too",
        )
    if parallel.vocab_parallel_pp is True:
        yield (
            "parallel.vocab_parallel_pp=true",
            "ranks that share embedding and head would wait in them",
        )
    if train.compute_dtype == "float16":
        yield "train.compute_dtype='float16'", "its loss scale is known after a step alone"
    if parallel.slices > 1:
        yield f"parallel.slices={parallel.slices}", "slices of sequences do not overlap"
    if parallel.reshards:
        yield "parallel.reshard_after_forward=true", "ops gather what others have updated already"
    from jaxpipe.optimizer import KINDS, kind_of  # needs jax

    kind = kind_of(config.optimizer.name)
    has_matrices = parallel.tp == 1 and (parallel.dp == 1 or not parallel.zero_stage)
    if not (kind.is_elementwise or (kind.is_per_matrix and has_matrices)):
        name = config.optimizer.name
        fit = [name for name, kind in KINDS.items() if kind.is_elementwise]
        yield (
            f"optimizer.name={name!r}",
            f"a rank updates elementwise, as {', '.join(fit)} do"
            + ", or by full matrices (parallel.tp=1, parallel.zero_stage=0)" * kind.is_per_matrix,
        )
