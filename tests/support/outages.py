"""Disks and stores that fail for a while, for runs that other processes make."""

import json
import threading
import time

from several import REPOSITORY

# Errors by the part of a path; `FASTER` seconds pass in one.
FAILING = """
import builtins, errno, io, json, os, pathlib, time
FLAG, FASTER = os.environ.get("OUTAGE"), float(os.environ.get("FASTER", "1"))

def fail(path):
    try:
        with real_open(FLAG) as file:
            wanted = json.loads(file.read())
    except (OSError, ValueError):
        return
    own = wanted["process"] in (os.environ.get("JAX_PROCESS_ID"), None)
    if own and wanted["part"] in str(path) and FLAG not in str(path):
        with real_open(FLAG + ".hit", "a") as file:
            file.write(str(path))
        code = getattr(errno, wanted["error"])
        raise OSError(code, os.strerror(code), str(path))

if FLAG:
    real_open, real_os_open, real_sleep = io.open, os.open, time.sleep
    def opened(path, *arguments, **options):
        if isinstance(path, (str, os.PathLike)) and str(path) != FLAG:
            fail(path)
        return real_open(path, *arguments, **options)
    io.open = builtins.open = opened
    import importlib.abc, sys
    class Hook(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name not in HOOKS:
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            sys.meta_path.insert(0, self)
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (run(module), HOOKS[name](module))
            return spec
    def of_tokens(module):
        class Numpy:
            def __getattr__(self, name):
                return getattr(real, name)
            def fromfile(self, path, *arguments, **options):
                fail(path)
                return real.fromfile(path, *arguments, **options)
        real, module.np = module.np, Numpy()
    def of_storage(module):
        real = module.probe
        def probe(directory):
            fail(directory)
            return real(directory)
        module.probe = probe
    def of_logs(module):  # which stay open
        real = module.AppendedFile._write
        def write(self, file, record):
            fail(self._path)
            return real(self, file, record)
        module.AppendedFile._write = write
    def of_errors(module):
        module.LIMIT /= FASTER
        module._LONGEST_PAUSE /= FASTER
    HOOKS = {
        "jaxpipe.data.shards.tokens": of_tokens, "jaxpipe.runtime.storage.files": of_storage,
        "jaxpipe.runtime.storage.errors": of_errors, "jaxpipe.runtime.storage.directory": of_logs,
    }
    import importlib.util
    sys.meta_path.insert(0, Hook())
"""


class Outages:
    """What begins outages: `FASTER` seconds pass in one, and each lasts from its first hit on."""

    def __init__(self, faster):
        self.faster = faster

    def fail_for(self, seconds, part, error, process=None):
        self.fail(part, error, process)
        end = time.monotonic() + 120
        while not self.has_hit():
            assert time.monotonic() < end, f"the outage of {part} ({error}) hits nothing"
            time.sleep(0.05)
        time.sleep(seconds / self.faster)
        self.stop()


class Disk(Outages):
    """What tells the processes of a run which calls fail."""

    def __init__(self, folder, faster):
        super().__init__(faster)
        self._flag, self._hit = folder / "outage", folder / "outage.hit"
        (folder / "sitecustomize.py").write_text(FAILING)
        self.environment = {
            "PYTHONPATH": f"{folder}:{REPOSITORY}", "OUTAGE": str(self._flag),
            "FASTER": str(faster),
        }  # fmt: skip

    def fail(self, part, error, process=None):
        """Let calls raise this error for paths with this part, in one process or in all."""
        self._hit.unlink(missing_ok=True)
        fresh = self._flag.with_suffix(".new")
        fresh.write_text(json.dumps({"part": part, "error": error, "process": process}))
        fresh.replace(self._flag)

    def has_hit(self):
        return self._hit.exists()

    def stop(self):
        self._flag.unlink()


class Store(Outages):
    """A server of `object_store` that refuses requests, or is silent."""

    def __init__(self, server, faster):
        super().__init__(faster)
        self._server, self._app = server, server._app
        self._fault, self._hits, self._over = None, 0, threading.Event()
        server._app = self._answer
        # botocore waits 60 s for an answer.
        kept = {"config_kwargs": {"read_timeout": 60 / faster, "connect_timeout": 60 / faster}}
        self.environment = server.environment | {"FSSPEC_S3": json.dumps(kept)}

    def close(self):
        self._server._app = self._app

    def fail(self, part, error, process=None):
        """Answer requests for paths with this part by an HTTP status, or by "silence"."""
        self._hits = 0
        self._over.clear()
        self._fault = part, error

    def has_hit(self):
        return self._hits > 0

    def stop(self):
        self._fault = None
        self._over.set()

    def _answer(self, environ, start_response):
        fault = self._fault
        asked = f"{environ['PATH_INFO']}?{environ.get('QUERY_STRING', '')}"
        if not fault or fault[0] not in asked:
            return self._app(environ, start_response)
        self._hits += 1
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if fault[1] == "silence":
            self._over.wait()
        name = {403: "ExpiredToken"}.get(fault[1], "SlowDown")
        body = f"<Error><Code>{name}</Code><Message>{name}</Message></Error>".encode()
        status = "403 Forbidden" if fault[1] == 403 else "503 Slow Down"
        headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
        start_response(status, headers)
        return [body]
