"""A plan that knows the lengths of its documents from the manifest of a prepared folder."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from jaxpipe.config import DataConfig, load
from jaxpipe.data.packing import pack_documents
from jaxpipe.data.packing_estimate import estimate_packing
from jaxpipe.data.shards.manifest import MANIFEST, FolderManifest, TokenizerEntry, build_histogram
from jaxpipe.plan import main

SMALL = Path(__file__).parents[1] / "data" / "small.toml"
PACKED = ["train.seq_len=512", "data.packing=best_fit"]


def lengths():
    return np.exp(np.random.default_rng(0).normal(5, 1, 50_000)).astype(int) + 2


@pytest.fixture
def folder(tmp_path):
    """Write a folder with only its manifest: a plan reads no tokens."""
    documents = lengths()
    tokens = int(documents.sum())
    manifest = FolderManifest(
        tokenizer=TokenizerEntry("bytes", "", 256, None), documents=len(documents), tokens=tokens,
        counted=tokens, longest=int(documents.max()), smallest_id=0, largest_id=255,
        histogram=build_histogram(documents), empty=0, bad_lines=0, origin="", shards=(),
    )  # fmt: skip
    (tmp_path / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    return tmp_path


@pytest.mark.parametrize("how", ["sequential", "best_fit"])
def test_what_is_expected_is_what_the_documents_make(folder, how):
    rows = estimate_packing(folder, DataConfig(packing=how), 512)
    slots = lengths() - 1
    packing = pack_documents(lengths(), 512, how, most=64)
    efficiency = slots.sum() / (len(packing) * 512)
    assert rows.efficiency == pytest.approx(efficiency, abs=0.005)
    squares = (slots // 512).sum() * 512**2 + ((slots % 512) ** 2).sum()
    found = sum(count * length**2 for length, count in rows.documents.items())
    tokens = sum(count * length for length, count in rows.documents.items())
    assert found / tokens == pytest.approx(squares / slots.sum(), rel=0.01)


def planned(capsys, *options):
    assert main([str(SMALL), *PACKED, "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_counts_tokens_that_are_no_padding(folder, capsys):
    whole, packed = planned(capsys), planned(capsys, "--lengths", str(folder))
    rows = estimate_packing(folder, DataConfig(packing="best_fit"), 512)
    for one, other in zip(whole["schedules"], packed["schedules"]):
        share = other["tokens_per_second"] / one["tokens_per_second"]
        assert share == pytest.approx(rows.efficiency, rel=1e-3)
    model, best = load(SMALL, PACKED).model, packed["best"]
    rate = next(r["tokens_per_second"] for r in packed["schedules"] if r["schedule"] == best)
    tokens = sum(count * length for length, count in rows.documents.items())
    mfu = rate / 8 * model.flops_of_documents(rows.documents) / tokens / 989e12
    (sentence,) = packed["sentences"]
    assert f"{rows.efficiency:.2%} of the rows is no padding" in sentence
    assert f"{best}: MFU {mfu:.1%}" in sentence


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--lengths", "nowhere"], "nowhere has no manifest.json: give a folder"),
        (["data.packing=none", "--lengths", "FOLDER"], "but data.packing='none': set it to"),
    ],
)
def test_bad_input_is_one_sentence(folder, capsys, options, sentence):
    options = [word.replace("FOLDER", str(folder)) for word in options]
    assert main([str(SMALL), *PACKED, *options]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert sentence in said
