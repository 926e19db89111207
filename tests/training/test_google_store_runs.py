"""A run whose run.dir is at gs://, in a server on this machine that speaks Google's protocol."""

import shutil

import pytest
from commands import SMALL, losses

from jaxpipe import train
from jaxpipe.runtime.storage.files import download, list_files, open_path

ADDRESS = "gs://jaxpipe-test/run"
TINY = [
    "model.d_model=16", "model.n_heads=2", "model.n_kv_heads=1", "model.d_ff=16",
    "train.seq_len=8", "train.eval_every=0", "checkpoint.every=2",
]  # fmt: skip
FIRST = ["parallel.pp=2", "parallel.dp=4", "train.microbatch_size=1", "train.steps=4"]
THEN = ["parallel.pp=4", "parallel.dp=2", "train.microbatch_size=2", "train.steps=6"]


@pytest.fixture
def store(monkeypatch, tmp_path):
    pytest.importorskip("gcsfs", reason="needs pip install gcsfs")
    emulator = pytest.importorskip(
        "gcp_storage_emulator.server", reason="needs pip install gcp-storage-emulator"
    )
    server = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket="jaxpipe-test")
    server.start()
    host, port = server._api._httpd.server_address
    address = f"http://{host}:{port}"
    for name, value in {
        "STORAGE_EMULATOR_HOST": address,  # for gcsfs
        "TENSORSTORE_GCS_HTTP_URL": address,
        "FSSPEC_GS_TOKEN": "anon",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    yield
    server.stop()


def test_a_run_resumes_on_another_mesh_with_the_bits_of_a_run_on_a_disk(store, tmp_path, capsys):
    for directory in (tmp_path / "disk", ADDRESS):
        for settings in (FIRST, THEN):
            assert train.main([str(SMALL), f"run.dir={directory}", *TINY, *settings]) == 0
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    download(ADDRESS, tmp_path / "copy")
    assert losses(tmp_path / "copy") == losses(tmp_path / "disk")
    names = list_files(open_path(ADDRESS))
    steps = [step for step in (2, 4, 6) if f"checkpoints/{step}/commit_success.txt" in names]
    assert steps == [2, 4, 6]
    assert "resumed from step 4" in capsys.readouterr().out
