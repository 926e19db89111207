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
    sizes = argparse.Namespace(documents=6, tokens=1000, shards=3, manifest=manifest)
    opening.write_sparse(tmp_path, sizes)
    documents = open_documents(str(tmp_path), 10)
    assert documents.lengths.tolist() == [1000] * 6
    assert {shard.vouched for shard in documents.shards} == {manifest}
    assert not documents.stream(0, 6000).any()
    config = DataConfig(source="file", path=str(tmp_path), heldout_path=str(tmp_path))
    took = opening.open_and_read(config, print, seq_len=64)
    assert took.opening > 0
    assert took.memory > 1e6


def test_the_command_says_what_opening_took(capsys):
    assert main(["opening", "--documents", "1000", "--tokens", "100000", "--shards", "2"]) == 0
    said = capsys.readouterr().out
    assert re.match(r"1,000 documents, 0.0002 TB in 2 shards: opened in \d+\.\d\d s, first ", said)
