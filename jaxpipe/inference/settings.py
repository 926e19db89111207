"""The configuration of a program that uses a trained model. Importing this imports no jax."""

from collections.abc import Sequence

import msgspec

from jaxpipe.config import Config, ConfigError, build, read_overrides
from jaxpipe.model import ModelConfig
from jaxpipe.planning.checks import check_settings
from jaxpipe.runtime import processes
from jaxpipe.runtime.devices import check_devices
from jaxpipe.runtime.environment import use_cpu_devices, use_gpu_memory

_EXAMPLES = 4  # sequences of a microbatch and replica, unless `train.microbatch_size` is given
_BUCKET = 128  # lengths are rounded up to a multiple of it [tokens], for fewer programs
_TRAIN = {"steps": 1, "microbatch_size": 1, "variable_length": True}
# Fields of [model] that choose an implementation; all others are those of the trained model.
_MAY_BE_SET = ("attention", "capacity_factor")


def start_devices(overrides: Sequence[str]) -> None:
    """Make the devices of `runtime.cpu_devices`, or those that jax finds, available.

    Call it before jax is first used. Raises `ConfigError` where there is no device, or several
    processes are started.
    """
    if processes.started() > 1:
        raise ConfigError(
            f"{processes.started()} processes are started, but a trained model is used by one, "
            f"with all devices of its machine: start one."
        )
    count = read_overrides(overrides).get("runtime", {}).get("cpu_devices", 0)
    if isinstance(count, int) and count > 0:
        use_cpu_devices(count)
    use_gpu_memory()
    check_devices()


def check_generation(config: Config) -> None:
    """Raise `ConfigError` for a mesh on which tokens cannot be generated.

    Every token goes through all layers before the next one can, so pipeline ranks would wait for
    each other.
    """
    parallel = config.parallel
    alone = parallel.pp, parallel.dp, parallel.slices, parallel.sequence_parallel
    if alone != (1, 1, 1, False):
        raise ConfigError(
            f"tokens are generated on one device or over parallel.tp, but the mesh is "
            f"{parallel.mesh} slices={parallel.slices} sequence_parallel="
            f"{str(parallel.sequence_parallel).lower()}: set parallel.tp alone; a model of any "
            f"mesh is put there."
        )


def inference_config(
    model: ModelConfig, overrides: Sequence[str], *, rows: int, longest: int
) -> Config:
    """The configuration with which a trained model is used, on one device unless overridden.

    Args:
      model: its `[model]`.
      overrides: `section.key=value` of mesh, devices and batch.
      rows: number of sequences.
      longest: inputs of the longest sequence [tokens].

    Without `train.grad_accum_steps` and `train.microbatch_size` a batch has two microbatches per
    pipeline rank, of four sequences each, or fewer where that is enough for `rows`.

    Raises `ConfigError` where a setting is wrong, or one of `[model]` would make another model.
    """
    settings = read_overrides(overrides)
    for name in settings.get("model", {}):
        if name not in _MAY_BE_SET:
            raise ConfigError(
                f"model.{name} is given by the trained model: leave it out; of [model] only "
                f"{' and '.join(_MAY_BE_SET)} may be set."
            )
    tree = {
        "model": msgspec.to_builtins(model.for_inference()),
        "train": {**_TRAIN, "seq_len": max(longest, 2)},
    }
    first = build(tree, overrides)
    parallel, chunks = first.parallel, first.train.loss_chunks
    microbatches = 2 * parallel.pp if parallel.pp > 1 else 1
    replicas = max(parallel.dp // parallel.cp, 1)
    examples = min(_EXAMPLES, -(-rows // (microbatches * replicas)))
    multiple = parallel.sequence_shards * chunks
    tree["train"] |= {
        "grad_accum_steps": 0 if first.train.batch_tokens else microbatches,
        "microbatch_size": examples * parallel.cp,
        "seq_len": max(-(-longest // multiple) * multiple, 2),
        "length_bucket": _BUCKET * multiple,
        "pad_to_multiple_of": chunks,
    }
    config = build(tree, overrides)
    check_settings(config)
    return config
