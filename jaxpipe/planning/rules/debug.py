"""Rules of the messages that are printed to debug a step (`[debug]`)."""

from jaxpipe.config import Config, ConfigError


def check_debug(config: Config) -> None:
    """Raise `ConfigError` if the ticks or pipeline ranks to print do not exist.

    `debug.ticks` must be two numbers, the first tick and the last, in this order and from 0 on.

    `debug.pp_ranks` must be in 0 to `parallel.pp` - 1.
    """
    debug, pp = config.debug, config.parallel.pp
    if debug.ticks and not (len(debug.ticks) == 2 and 0 <= debug.ticks[0] <= debug.ticks[1]):
        raise ConfigError(
            f"debug.ticks={list(debug.ticks)} must be the first and the last tick to print, such "
            f"as [0, 3]: change it, or leave it out for all."
        )
    for rank in debug.pp_ranks:
        if not 0 <= rank < pp:
            raise ConfigError(
                f"debug.pp_ranks={list(debug.pp_ranks)}, but with parallel.pp={pp} there are ranks "
                f"0 to {pp - 1}: leave {rank} out."
            )
