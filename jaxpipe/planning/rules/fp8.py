"""Rules of matrix products in 8-bit floats."""

from math import prod

from jaxpipe.config import Config, ConfigError

_MULTIPLE = 16  # cuBLAS needs every size of such a product to be a multiple of it


def check_fp8(config: Config) -> None:
    """Raise `ConfigError` if products cannot be computed in 8-bit floats.

    `train.fp8` needs a `model.family` whose products can be made in 8 bits.

    `train.fp8` needs sizes of products that are multiples of 16: `model.d_model`, and on a device
    the widths of heads, of keys and of the MLP, and the tokens of a microbatch or sequence slice.
    """
    train = config.train
    if train.fp8 == "none":
        return
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


def _tokens(config: Config) -> dict[str, int]:
    """Number of tokens in a product on a device, by the settings that give it."""
    parallel, train = config.parallel, config.train
    cuts = {"parallel.slices": parallel.slices, "parallel.cp": parallel.cp}
    if config.halves:
        cuts["2 halves"] = 2
    cut = "".join(f" / {name}" for name, size in cuts.items() if size > 1)
    lengths = {f"train.seq_len{cut}": train.seq_len // prod(cuts.values())}
    if train.variable_length:  # rows are padded to multiples of it, but not beyond seq_len
        lengths["train.pad_to_multiple_of"] = train.pad_to_multiple_of
    return {
        f"train.microbatch_size x {name}": train.microbatch_size * length
        for name, length in lengths.items()
    }
