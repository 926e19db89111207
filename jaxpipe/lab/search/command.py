"""The command `plan --search`: its arguments, and the search that they ask for."""

import argparse
from collections.abc import Collection

from msgspec import structs

from jaxpipe import config as configs
from jaxpipe.config import Config, ConfigError
from jaxpipe.config.reading import read_overrides
from jaxpipe.lab.search.layout_search import LayoutSearch
from jaxpipe.lab.search.result import SearchResult
from jaxpipe.lab.search.space import SEARCHED, SearchSpace
from jaxpipe.lab.search.table import explain_winner, nothing_found
from jaxpipe.planning.cost.estimate import Estimate
from jaxpipe.planning.cost.hardware import Hardware
from jaxpipe.planning.progress import PlanProgress
from jaxpipe.planning.rules.across import check_batch
from jaxpipe.planning.settings import changed, words_of

_OF_PLANS = ("costs", "lengths", "bubble", "fused_steps", "show", "timeline", "picture", "html")


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise `ConfigError` for options of `plan` that do not go with `--search`."""
    if len(arguments.devices or ()) != 1 or arguments.devices[0] < 1:
        raise ConfigError("--search needs one number of devices: give --devices N.")
    if arguments.schedules:
        raise ConfigError("--schedules with --search, which tries all schedules: leave it out.")
    if others := [name for name in _OF_PLANS if getattr(arguments, name)]:
        options = ", ".join(f"--{name}".replace("_", "-") for name in others)
        raise ConfigError(f"{options} with --search: write what it finds, and plan that with them.")
    file = arguments.write
    if file and file.suffix != ".toml":
        raise ConfigError(f"--write {file}: with --search give a name that ends in .toml.")
    cards = arguments.check_gpu or ()
    if len(cards) > 1 or any(card.upper() != arguments.device for card in cards):
        raise ConfigError(
            f"--check-gpu {','.join(cards)} with --search --device {arguments.device}: a search is "
            f"for one device, so give both the same."
        )


def search_layouts(
    arguments: argparse.Namespace, hardware: Hardware
) -> tuple[list[Estimate], SearchResult, str]:
    """Return the best of the search that arguments of `plan` ask for, the fastest first.

    Also returns sentences: what the fastest gains over the configuration, in which settings, and
    over the second.

    Raises `ConfigError` where nothing is possible, or nothing fits.
    """
    overrides = read_overrides(arguments.overrides)
    fixed = [f"{section}.{key}" for section, settings in overrides.items() for key in settings]
    config = _with_one_batch(configs.load(arguments.config, arguments.overrides), fixed)
    space = SearchSpace(config, arguments.devices[0], fixed, hardware.per_host)
    memory = arguments.memory or hardware.sheet.memory
    search = LayoutSearch(space, hardware, memory, progress=PlanProgress())
    result = search.run()
    if not result.best:
        raise ConfigError(nothing_found(search, result))
    best = [one.estimate() for one in result.best]
    words = words_of(changed(config, best[0].plan.config, SEARCHED))
    sentence = "fastest: the configuration as it is"
    if words:
        sentence = f"fastest: {search.gain(result.best[0])}. To run it: {words}"
    if len(best) > 1:
        sentence += f"\n{explain_winner(*best[:2])}"
    return best, result, sentence


def _with_one_batch(config: Config, fixed: Collection[str]) -> Config:
    """The configuration with the tokens of a step of the command line, not of the file.

    A search is for these tokens, so it has no use for those of the file beside them.

    Raises `ConfigError` if one place gives them twice, or none does.
    """
    settings = ("grad_accum_steps", "batch_tokens")
    given = [name for name in settings if f"train.{name}" in fixed]
    if len(given) == 1:
        unset = {name: 0 for name in settings if name not in given}
        config = structs.replace(config, train=structs.replace(config.train, **unset))
    check_batch(config)
    return config
