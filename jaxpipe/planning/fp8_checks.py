"""The rules of products in 8-bit floats."""

from math import prod

from jaxpipe.config import Config, ConfigError
from jaxpipe.runtime.devices import compute_capability

_LEAST_CAPABILITY = 8.9  # Ada and Hopper: the first with products of 8-bit floats
_MULTIPLE = 16  # of which cuBLAS wants every size of such a product


def check_fp8(config: Config, platform: str | None) -> None:
    """The stream is bfloat16, and GPUs, if there are any, multiply such sizes in 8 bits.

    Raises `ConfigError` at the first rule that is broken.
    """
    train = config.train
    if train.fp8 == "none":
        return
    if train.compute_dtype != "bfloat16":
        raise ConfigError(
            f"train.fp8={train.fp8!r} with train.compute_dtype={train.compute_dtype!r}: between "
            f"products in 8 bits values are bfloat16; set train.compute_dtype=bfloat16, or "
            f"train.fp8=none."
        )
    sizes = config.model.product_sizes(config.parallel.tp)
    if not sizes:
        raise ConfigError(
            f"train.fp8={train.fp8!r} is not for models of the family {config.model.family!r}: set "
            f"train.fp8=none, or choose another model.family."
        )
    for name, size in (sizes | _tokens(config)).items():
        if size % _MULTIPLE:
            raise ConfigError(
                f"train.fp8={train.fp8!r} multiplies matrices whose sizes must be multiples of "
                f"{_MULTIPLE}, but {name} is {size}: change it, or set train.fp8=none."
            )
    capability = compute_capability() if platform in ("gpu", "cuda") else None
    if capability is not None and capability < _LEAST_CAPABILITY:
        raise ConfigError(
            f"train.fp8={train.fp8!r} needs GPUs of compute capability {_LEAST_CAPABILITY} (Ada, "
            f"Hopper) or later, but these have {capability}: set train.fp8=none."
        )


def _tokens(config: Config) -> dict[str, int]:
    """How many tokens a product has on a device, with what makes them."""
    parallel, train = config.parallel, config.train
    cuts = {"parallel.slices": parallel.slices, "parallel.cp": parallel.cp}
    cut = "".join(f" / {name}" for name, size in cuts.items() if size > 1)
    name, length = "train.seq_len", train.seq_len // prod(cuts.values())
    if train.variable_length:
        name, cut, length = "train.pad_to_multiple_of", "", train.pad_to_multiple_of
    return {f"train.microbatch_size x {name}{cut}": train.microbatch_size * length}
