"""A store that does not answer is told from one that refuses: only the first is worth a restart."""

import errno
import sys

import pytest
from commands import SMALL, start
from object_store import BUCKET, s3_server
from several import ends, free_port

from jaxpipe.checkpoint.integrity import succeed_on_all_processes
from jaxpipe.config import ConfigError
from jaxpipe.runtime.storage_errors import as_os_errors, does_not_answer

NOWHERE = "http://127.0.0.1:9"
WORDS = {
    "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1",
    "AWS_ENDPOINT_URL": NOWHERE,
}  # fmt: skip


def of_s3(name, **fields):
    return getattr(pytest.importorskip("botocore.exceptions"), name)(**fields)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionRefusedError(), True),
        (TimeoutError(), True),
        (OSError(errno.ETIMEDOUT, "Connection timed out"), True),
        (OSError(errno.ESTALE, "Stale file handle"), True),
        (ValueError("UNAVAILABLE: Error reading s3://bucket/run"), True),
        (("EndpointConnectionError", {"endpoint_url": NOWHERE}), True),
        (("ReadTimeoutError", {"endpoint_url": NOWHERE}), True),
        (("NoCredentialsError", {}), False),
        (PermissionError(errno.EACCES, "Permission denied"), False),
        (FileNotFoundError(errno.ENOENT, "No such file"), False),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (ValueError('NOT_FOUND: Error opening "zarr" driver'), False),
    ],
)
def test_what_may_answer_later(error, expected):
    """Also as the cause of what a checkpoint's reader raises."""
    error = error if isinstance(error, Exception) else of_s3(error[0], **error[1])
    with pytest.raises(ConfigError) as raised, succeed_on_all_processes("1"), as_os_errors():
        raise error
    assert does_not_answer(error) == does_not_answer(raised.value) == expected


def train(run_dir, environment, devices=8):
    words = [str(SMALL), f"run.dir={run_dir}", f"runtime.cpu_devices={devices}"]
    return start([sys.executable, "-m", "jaxpipe.train", *words], environment)


@pytest.mark.extended
def test_a_run_ends_with_a_code_of_its_own():
    pytest.importorskip("s3fs")
    process = train("s3://bucket/run", WORDS)
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 7, said
    assert "run.dir='s3://bucket/run' does not answer (EndpointConnectionError: " in said


@pytest.mark.slow
def test_all_processes_end_so_where_one_gets_no_answer():
    server = s3_server()
    places = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    environments = (server.environment, WORDS)
    group = [
        train(f"s3://{BUCKET}/run", environment | places | {"JAX_PROCESS_ID": str(index)}, 4)
        for index, environment in enumerate(environments)
    ]
    (first, said), (second, also) = ends(group)
    # The one that leaves first may end the other with 3, after which it is restarted, too.
    assert 7 in (first, second), said + also
    assert {first, second} <= {3, 7}, said + also
    assert "does not answer (EndpointConnectionError: " in said + also
