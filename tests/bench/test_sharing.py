"""The commands about sequences that replicas share: steps beside one device's; documents dealt."""

import re

import msgspec
import numpy as np
import pytest

from jaxpipe.bench import zigzag
from jaxpipe.bench.__main__ import main

ROW = np.array([300, 1, 200, 11])


@pytest.mark.parametrize("deal", [zigzag.whole_row, zigzag.each_alone])
def test_every_token_is_dealt_once(deal):
    dealt = deal(ROW, 4)
    assert sorted(np.concatenate(dealt).tolist()) == list(range(ROW.sum()))
    assert all((np.diff(own) > 0).all() for own in zigzag.whole_row(ROW, 4))


def test_scores_of_one_text_are_as_many_for_all():
    """Own ones of a device are the causal half; the others two half blocks a turn."""
    row = np.array([2048])
    dealt = zigzag.whole_row(row, 4)
    assert zigzag.halves_made(row, dealt) == 512 * 640 // 2 + 3 * 2 * 256**2
    assert zigzag.tiles_made(row, dealt) == (10 + 3 * 8) * 128**2


def test_blocks_without_a_key_that_is_seen_are_not_made():
    """Of two documents the second has all late stretches, whose queries then see no early keys."""
    row = np.array([1024, 1024])
    dealt = zigzag.whole_row(row, 4)
    assert zigzag.halves_made(row, dealt) == 512 * 640 // 2 + 3 * 256**2
    assert zigzag.tiles_made(row, dealt) == (2 * 3 + 3 * 4) * 128**2


def test_a_key_is_seen_by_later_queries_of_its_document():
    """As of every pair by itself, for places that no deal would put together too."""
    dice, place = np.random.default_rng(0), np.arange(ROW.sum())
    document = np.repeat(np.arange(len(ROW)), ROW)
    sees = (document[:, None] == document) & (place <= place[:, None])
    found = []
    for _ in range(200):
        queries, keys = (np.sort(dice.choice(place, dice.integers(1, 5))) for _ in range(2))
        found.append(sees[np.ix_(queries, keys)].any())
        assert zigzag._any_seen(ROW, queries, keys) == found[-1]
    assert 0 < sum(found) < len(found)


def test_the_command_counts_both_ways(capsys):
    sizes = ["--mean", "200", "--seq-len", "1024", "--devices", "2", "--rows", "2"]
    assert main(["zigzag", *sizes]) == 0
    said = capsys.readouterr().out
    assert said.startswith("20,000 documents of 20")
    assert [line.split("|")[1].strip() for line in said.splitlines()[3:]] == [
        "rows", "rows", "documents", "documents",
    ]  # fmt: skip
    assert main(["zigzag", "--rows", "0"]) == 2


def test_steps_of_two_processes_beside_one(tmp_path, capsys):
    config = tmp_path / "tiny.toml"
    config.write_text(
        "[model]\nn_layers=1\nd_model=16\nn_heads=2\nn_kv_heads=2\nd_ff=16\nvocab_size=32\n"
        "[train]\nsteps=1\ngrad_accum_steps=1\nmicrobatch_size=1\nseq_len=16\n"
        '[data]\nsource="dummy"\n'
    )
    out = tmp_path / "out.json"
    assert (
        main(["context", str(config), "--methods", "ring", "--rounds", "1", "--out", str(out)]) == 0
    )
    assert re.search(r"\| ring \| \d+\.\d+ \| \d+\.\d+ \|", capsys.readouterr().out)
    found = msgspec.json.decode(out.read_bytes())["seconds"]
    assert [len(seconds) for seconds in found.values()] == [1, 1]
