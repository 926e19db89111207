"""A real S3 server on this machine, for runs whose run.dir is in an object store."""

import logging
import threading
from functools import cache

import pytest

BUCKET = "jaxpipe-test"


class Server:
    """A running server: its environment for clients, and a function that sees every request."""

    def __init__(self, app):
        from werkzeug.serving import make_server

        self.on_request = lambda method, path: None
        self._app = app
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_MAX_ATTEMPTS": "2",
        }

    def _answer(self, environ, start_response):
        self.on_request(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        return self._app(environ, start_response)


@cache  # clients remember the address of the first server of a process
def s3_server():
    """Return a server that has the bucket `BUCKET`."""
    for package in ("s3fs", "moto", "flask"):
        pytest.importorskip(package, reason=f"needs pip install 'moto[server]' s3fs ({package})")
    from moto.server import DomainDispatcherApplication, create_backend_app

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = Server(DomainDispatcherApplication(create_backend_app))
    client(server).create_bucket(Bucket=BUCKET)
    return server


def connect(server, tmp_path, monkeypatch):
    """Make this process a client of the server, with an empty cache directory."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return server


def clear(server):
    """Remove all files."""
    for key in keys(server):
        client(server).delete_object(Bucket=BUCKET, Key=key)


def client(server):
    """Return a client of boto3."""
    import boto3

    of = server.environment
    return boto3.client(
        "s3", endpoint_url=of["AWS_ENDPOINT_URL"], region_name=of["AWS_DEFAULT_REGION"],
        aws_access_key_id="test", aws_secret_access_key="test",
    )  # fmt: skip


def keys(server, prefix=""):
    """Return the names of all files whose name begins so."""
    pages = client(server).get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
    return sorted(one["Key"] for page in pages for one in page.get("Contents", ()))


def read(server, key):
    """Return the text of a file."""
    return client(server).get_object(Bucket=BUCKET, Key=key)["Body"].read().decode()
