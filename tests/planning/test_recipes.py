"""The table of recipes in the room of configurations says what `plan` says."""

import json
from pathlib import Path

import pytest

from jaxpipe import config as configs
from jaxpipe.plan import main

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "jaxpipe" / "config" / "README.md"
ROWS = [
    line for line in PAGE.read_text().splitlines() if line.startswith("| `") and ".toml" in line
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("`")[1])
def test_a_row_is_what_the_plan_says(row, capsys):
    arguments = row.split("`")[1].split()
    path, overrides = str(ROOT / "configs" / arguments[0]), arguments[1:]
    assert main([path, *overrides, "--json"]) == 0
    schedules = json.loads(capsys.readouterr().out)["schedules"]
    own = next(one for one in schedules if one["configured"])
    config = configs.load(path, [word for word in overrides if "=" in word])
    parallel = config.parallel
    gpus = parallel.pp * parallel.dp * parallel.tp
    cells = [
        f"`{' '.join(arguments)}`",
        f"{config.model.parameter_count() / 1e9:.1f}",
        f"{parallel.pp} x {parallel.dp} x {parallel.tp}",
        f"{config.tokens_per_step:,}",
        f"`{own['schedule']}`",
        f"{own['bubble_scan']:.1%}".replace("%", " %"),
        f"{own['bytes']['total'] / 2**30:.1f}",
        f"{own['tokens_per_second'] / gpus:,.0f}",
    ]
    assert row == f"| {' | '.join(cells)} |"
