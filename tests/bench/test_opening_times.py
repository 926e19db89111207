"""A large set of sparse files opened: it is as large as it says, and opened whole."""

import argparse
import re

import pytest

from jaxpipe.bench import opening
from jaxpipe.bench.__main__ import main
from jaxpipe.config import DataConfig
from jaxpipe.data.opening import open_documents


@pytest.mark.parametrize("manifest", [True, False])
def test_sparse_files_are_a_set_of_documents(tmp_path, manifest):
    sizes = argparse.Namespace(documents=6, tokens=1000, sigma=0, shards=3, manifest=manifest)
    opening.write_sparse(tmp_path, sizes)
    documents = open_documents(str(tmp_path), 10)
    assert documents.lengths.tolist() == [1000] * 6
    assert {shard.vouched for shard in documents.shards} == {manifest}
    assert not documents.stream(0, 6000).any()
    config = DataConfig(source="file", path=str(tmp_path))
    took = opening.open_and_read(config, print, seq_len=64)
    assert took.opening > 0
    assert took.memory > 1e6


def test_rows_of_a_sparse_set_are_packed(tmp_path):
    sizes = argparse.Namespace(documents=3000, tokens=150, sigma=1.2, shards=1, manifest=False)
    opening.write_sparse(tmp_path, sizes)
    lengths = open_documents(str(tmp_path), 10).lengths
    assert lengths.mean() == pytest.approx(150, abs=1)
    assert lengths.max() > 1000
    took = [
        opening.open_and_read(
            DataConfig(source="file", path=str(tmp_path), packing=how), print, seq_len=512
        )
        for how in ("best_fit", "sequential")
    ]
    assert 0 < took[0].padding < 0.01 < 0.05 < took[1].padding


def test_the_command_says_what_opening_took(capsys):
    assert main(["opening", "--documents", "1000", "--tokens", "100000", "--shards", "2"]) == 0
    said = capsys.readouterr().out
    assert re.match(r"1,000 documents, 0.0002 TB in 2 shards: opened in \d+\.\d\d s \(\d", said)
