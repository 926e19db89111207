"""Packing measured on lengths alone."""

from jaxpipe.bench import packing
from jaxpipe.bench.__main__ import main
from jaxpipe.config import DataConfig
from jaxpipe.data.opening import open_documents


def test_documents_of_a_sparse_file_are_packed(tmp_path, capsys):
    path = packing.sparse_shard(tmp_path, 3000, 150)
    documents = open_documents(str(path), 10)
    assert len(documents.lengths) == 3000
    assert abs(documents.lengths.mean() - 150) <= 1
    config = DataConfig(source="file", path=str(path), packing="best_fit")
    rows, padding, *_ = packing.measure(config, 512)
    train, _ = documents.split(config.heldout_fraction)
    tokens = (train.lengths - 1).sum()
    assert padding == f"{1 - tokens / int(rows) / 512:.3%}"
    words = ["--documents", "3000", "--mean", "150", "--seq-len", "512"]
    assert main(["packing", *words]) == 0
    said = capsys.readouterr().out
    assert "best_fit" in said
    assert "sequential" in said
    assert "3,000 documents" in said
