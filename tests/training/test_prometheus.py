"""Metrics for Prometheus, read over HTTP with the official client's parser."""

import sys
import urllib.request

import pytest
from commands import SMALL
from several import free_port

from jaxpipe import train
from jaxpipe.config import load
from jaxpipe.run.watch.loggers import open_loggers
from jaxpipe.run.watch.metrics import MetricsLog
from jaxpipe.runtime.storage.directory import WriteGuard

pytest.importorskip("prometheus_client")


def scraped(port):
    """Return the value by gauge and index."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://localhost:{port}/metrics") as page:
        text = page.read().decode()
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
    assert all(sample.labels["run"] == "mine" for sample in samples)
    return {(sample.name, sample.labels.get("index", "")): sample.value for sample in samples}


def test_the_newest_step_is_served(tmp_path):
    port = free_port()
    config = load(SMALL, [f"run.dir={tmp_path / 'mine'}", f"log.prometheus_port={port}"])
    with MetricsLog(tmp_path, last_step=0, loggers=open_loggers(config, 0)) as log:
        log.write(1, {"loss": 2.5, "eval_loss": 3.0, "counts": [[1, 2]], "many": [0] * 100})
        log.write(2, {"loss": float("inf"), "tokens_seen": 2**40, "counts": [[3, 4]]})
        assert scraped(port) == {
            ("jaxpipe_step", ""): 2,
            ("jaxpipe_loss", ""): float("inf"),
            ("jaxpipe_eval_loss", ""): 3.0,
            ("jaxpipe_tokens_seen", ""): 2**40,
            ("jaxpipe_counts", "0/0"): 3,
            ("jaxpipe_counts", "0/1"): 4,
        }
    for logger in open_loggers(config, 0):  # the port is free again
        logger.close()


def test_a_port_in_use_is_one_warning(tmp_path):
    said, port = [], free_port()
    config = load(SMALL, [f"run.dir={tmp_path}/mine", f"log.prometheus_port={port}"])
    (first,) = open_loggers(config, 0)
    assert open_loggers(config, 0, WriteGuard(said.append)) == []
    first.close()
    (sentence,) = said
    assert sentence.startswith(f"warning: log.prometheus_port={port} cannot be written (Address")
    assert "training goes on" in sentence


def test_without_the_package_the_configuration_is_refused(tmp_path, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.split(".")[0] == "prometheus_client"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    assert train.main([str(SMALL), f"run.dir={tmp_path}/run", "log.prometheus_port=9100"]) == 2
    said = capsys.readouterr().err
    assert "log.prometheus_port=9100 needs the package prometheus_client, which is not" in said
