"""The newest metrics of a run for Prometheus, over HTTP."""

import re
from collections.abc import Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, MetricsHandler

from jaxpipe.config import Config
from jaxpipe.run.watch.loggers import Shown
from jaxpipe.runtime.bounded_server import BoundedServer

_SECONDS = 10  # that a connection may be silent
_THREADS = 8  # requests that are answered at once


class Prometheus:
    """A logger that serves the newest step's scalars at `http://HOST:<log.prometheus_port>/metrics`.

    A metric is the gauge `jaxpipe_<name>` with the label `run`, the last folder of `run.dir`, and
    the step is `jaxpipe_step`. Numbers of a small list share a gauge and differ in the label
    `index`, such as "3/1"; large lists are left out. Raises `OSError` where the port is in use.
    """

    def __init__(self, config: Config):
        port = config.log.prometheus_port
        self.name = f"Prometheus at port {port}"
        self._run = Path(config.run.dir).resolve().name
        self._registry, self._gauges = CollectorRegistry(), dict[str, Gauge]()
        self._server = BoundedServer(port, _Handler.factory(self._registry), _THREADS)

    def show(self, step: int, values: Shown) -> None:
        """Serve one step's scalars from now on."""
        for name, value in {"step": step, **values}.items():
            if isinstance(value, int | float):
                name, *index = name.split("/", 1)
                self._gauge(name, ["index"] if index else []).labels(self._run, *index).set(value)

    def rewind(self, last_step: int) -> None:
        """Do nothing: only the newest step is served."""

    def close(self) -> None:
        """Stop the server."""
        self._server.close()

    def _gauge(self, name: str, labels: Sequence[str]) -> Gauge:
        """The gauge of a metric, registered when it is first shown."""
        if name not in self._gauges:
            safe = re.sub(r"\W", "_", f"jaxpipe_{name}", flags=re.ASCII)
            about, labels = f"{name} of the newest step", ["run", *labels]
            self._gauges[name] = Gauge(safe, about, labels, registry=self._registry)
        return self._gauges[name]


class _Handler(MetricsHandler):
    timeout = _SECONDS
