"""A store that does not answer is told from one that refuses: only the first is worth a restart."""

import errno
import sys

import pytest
from commands import SMALL, start
from object_store import BUCKET, s3_server
from several import ends, free_port

from jaxpipe.checkpoint.integrity import succeed_on_all_processes
from jaxpipe.config import ConfigError
from jaxpipe.runtime.group import Group
from jaxpipe.runtime.storage import errors as storage_errors
from jaxpipe.runtime.storage.errors import as_os_errors, passes, remedy_of, retry

NOWHERE = "http://127.0.0.1:9"
WORDS = {
    "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1",
    "AWS_ENDPOINT_URL": NOWHERE,
}  # fmt: skip


def of_s3(name, **fields):
    return getattr(pytest.importorskip("botocore.exceptions"), name)(**fields)


def answer(status, name):
    response = {"Error": {"Code": name}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return {"error_response": response, "operation_name": "PutObject"}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionRefusedError(), True),
        (TimeoutError(), True),
        (OSError(errno.ETIMEDOUT, "Connection timed out"), True),
        (OSError(errno.ESTALE, "Stale file handle"), True),
        (OSError(errno.EIO, "Input/output error"), True),
        (OSError(errno.ENOTCONN, "Transport endpoint is not connected"), True),
        (OSError(errno.EREMOTEIO, "Remote I/O error"), True),
        (OSError(errno.EMFILE, "Too many open files"), True),
        (ValueError("INTERNAL: Error writing x [os_error_code=5: Input/output error]"), True),
        (ValueError("PERMISSION_DENIED: x: HTTP response code: 503 with body"), True),
        (ValueError("RESOURCE_EXHAUSTED: No space left on device [os_error_code=28]"), False),
        (("ClientError", answer(503, "SlowDown")), True),
        (("ClientError", answer(500, "InternalError")), True),
        (("ClientError", answer(403, "ExpiredToken")), True),
        (("ClientError", answer(400, "ExpiredToken")), True),
        (("ClientError", answer(403, "AccessDenied")), False),
        (("ClientError", answer(404, "NoSuchBucket")), False),
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
    together = succeed_on_all_processes(Group(), "1")
    with pytest.raises(ConfigError) as raised, together, as_os_errors():
        raise error
    assert passes(error) == passes(raised.value) == expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (("ClientError", answer(403, "403")), True),  # a HEAD request has no body with a name
        (ValueError("PERMISSION_DENIED: HTTP response code: 403 with body: <Error>"), True),
        (ValueError("PERMISSION_DENIED: cannot open [os_error_code=13: Permission denied]"), False),
        (PermissionError(errno.EACCES, "Permission denied"), False),
        (("ClientError", answer(404, "NoSuchKey")), False),
    ],
)
def test_a_store_that_worked_may_take_the_credentials_again(error, expected):
    error = error if isinstance(error, Exception) else of_s3(error[0], **error[1])
    assert passes(error, worked=True) == expected
    if expected:
        assert not passes(error)


class Clock:
    """A stand-in for `time` in which sleeping takes no time; `now` counts the seconds."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(storage_errors, "time", clock)
    monkeypatch.setattr(storage_errors, "_failing", {})
    return clock


def failing_until(clock, end, error):
    def call():
        if clock.now < end:
            raise error
        return "read"

    return call


@pytest.mark.parametrize("seconds", [10, 120, 145])
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error"),
        OSError(errno.ESTALE, "Stale file handle"),
        TimeoutError("timed out"),
        ValueError("PERMISSION_DENIED: HTTP response code: 403"),
        ValueError("UNAVAILABLE: HTTP response code: 503"),
    ],
    ids=str,
)
def test_an_outage_is_waited_out_and_reported_once(clock, seconds, error):
    lines = []
    assert retry(failing_until(clock, seconds, error), "the disk", lines.append) == "read"
    assert seconds <= clock.now <= seconds + 6
    assert len(lines) == 2, lines
    assert lines[0].startswith("warning: the disk does not answer (")
    assert lines[1].startswith("the disk answers again, after ")


def test_an_outage_ends_at_the_limit_and_other_errors_at_once(clock):
    with pytest.raises(OSError, match="Stale"):
        retry(failing_until(clock, 1e9, OSError(errno.ESTALE, "Stale")), "the disk", [].append)
    assert storage_errors.LIMIT <= clock.now <= storage_errors.LIMIT + 6
    for error in (OSError(errno.ENOSPC, "full"), FileNotFoundError(errno.ENOENT, "none")):
        before = clock.now
        with pytest.raises(OSError, match=r"full|none"):
            retry(failing_until(clock, 1e9, error), "the disk", [].append)
        assert clock.now == before


def test_the_limit_is_of_the_outage_and_not_of_each_call(clock):
    """So that a run which asks several times ends in time."""
    fail = failing_until(clock, 1e9, OSError(errno.ESTALE, "Stale"))
    for _ in range(3):
        with pytest.raises(OSError, match="Stale"):
            retry(fail, "the disk", [].append)
    assert clock.now <= storage_errors.LIMIT + 6


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


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "make room in here"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "make room in here"),
        (
            ValueError("RESOURCE_EXHAUSTED: x [os_error_code=28: No space left]"),
            "make room in here",
        ),
        (PermissionError(errno.EACCES, "Permission denied"), "make here writable"),
        (OSError(errno.EROFS, "Read-only file system"), "make here writable"),
        (("ClientError", answer(403, "AccessDenied")), "see that this machine reaches here"),
        (OSError(errno.EIO, "Input/output error"), "see that this machine reaches here"),
        (OSError(errno.ENAMETOOLONG, "File name too long"), "see that here can be written"),
        (ValueError("a bug"), ""),
        (MemoryError(), ""),
    ],
)
def test_the_remedy_is_that_of_the_error(error, expected):
    error = error if isinstance(error, Exception) else of_s3(error[0], **error[1])
    assert remedy_of(error, "here") == expected
    with pytest.raises(OSError) as raised, as_os_errors():  # noqa: PT011
        raise error
    assert remedy_of(raised.value, "here") == expected
