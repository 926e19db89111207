"""The table of recipes matches the output of `plan`."""

import json
from pathlib import Path

import pytest

from jaxpipe import config as configs
from jaxpipe.plan import main

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "jaxpipe" / "config" / "README.md").read_text().splitlines()
ROWS = [line for line in LINES if line.startswith("| `") and ".toml" in line]


@pytest.mark.slow(unless=["llama3_8b_16k_pp4.toml*"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("`")[1])
def test_a_row_is_what_the_plan_says(row, capsys):
    path, *words = row.split("`")[1].split()
    assert main([str(ROOT / "configs" / path), *words, "--json"]) == 0
    schedules = json.loads(capsys.readouterr().out)["schedules"]
    own = next(one for one in schedules if one["configured"])
    overrides = [word for word in words if "=" in word]
    config = configs.load(ROOT / "configs" / path, overrides)
    parallel = config.parallel
    gpus = parallel.pp * parallel.dp * parallel.tp
    cells = [
        f"`{' '.join([path, *words])}`",
        f"{config.model.parameter_count() / 1e9:.1f}",
        f"{parallel.pp} x {parallel.dp} x {parallel.tp}",
        f"{config.tokens_per_step:,}",
        f"`{own['schedule']}`",
        f"{own['bubble_scan']:.1%}".replace("%", " %"),
        f"{own['bytes']['total'] / 2**30:.1f}",
        f"{own['tokens_per_second'] / gpus:,.0f}",
    ]
    assert row == f"| {' | '.join(cells)} |"
