"""Tables of recipes, of the configurations and of mixtures, match the output of `plan`."""

import json
from pathlib import Path

import pytest

from jaxpipe import config as configs
from jaxpipe.plan import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "jaxpipe" / room / "README.md" for room in ("config", "model/moe")]
ROWS, MIXTURES = (
    [line for line in page.read_text().splitlines() if line.startswith("| `") and ".toml" in line]
    for page in PAGES
)
WORDS = {row: row.split("`")[1].split() for row in ROWS + MIXTURES}


def planned(row, capsys):
    """Return the configuration of a row, and the plan's entry of its own schedule."""
    path, *overrides = WORDS[row]
    path = str(ROOT / "configs" / path)
    assert main([path, *overrides, "--json"]) == 0
    schedules = json.loads(capsys.readouterr().out)["schedules"]
    own = next(one for one in schedules if one["configured"])
    return configs.load(path, [word for word in overrides if "=" in word]), own


def cells_of(row, own):
    """Return the cells that both tables share."""
    return (
        f"`{' '.join(WORDS[row])}`",
        f"`{own['schedule']}`",
        f"{own['bubble_scan']:.1%}".replace("%", " %"),
        f"{own['bytes']['total'] / 2**30:.1f}",
    )


@pytest.mark.slow(unless=["llama3_8b_16k_pp4.toml*"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("`")[1])
def test_a_row_is_what_the_plan_says(row, capsys):
    config, own = planned(row, capsys)
    words, schedule, bubble, size = cells_of(row, own)
    parallel = config.parallel
    gpus = parallel.pp * parallel.dp * parallel.tp
    cells = [
        words,
        f"{config.model.parameter_count() / 1e9:.1f}",
        f"{parallel.pp} x {parallel.dp} x {parallel.tp}",
        f"{config.tokens_per_step:,}",
        schedule,
        bubble,
        size,
        f"{own['tokens_per_second'] / gpus:,.0f}",
    ]
    assert row == f"| {' | '.join(cells)} |"


@pytest.mark.slow
@pytest.mark.parametrize("row", MIXTURES, ids=lambda row: row.split("`")[1])
def test_so_is_what_all_to_alls_cost(row, capsys):
    config, own = planned(row, capsys)
    seconds = config.tokens_per_step / own["tokens_per_second"]
    cells = [
        *cells_of(row, own),
        f"{own['waiting_for_replicas'] / seconds:.1%}".replace("%", " %"),
        f"{own['tokens_per_second']:,.0f}",
    ]
    assert row == f"| {' | '.join(cells)} |"
