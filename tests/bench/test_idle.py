"""When no device worked, in a recording as the profiler writes one."""

import gzip
import json

import pytest

from jaxpipe.bench.__main__ import main


def op(device, begin, duration, **more):
    about = {"hlo_op": "dot", "device_ordinal": str(device)} | more
    return {"ph": "X", "name": "dot", "ts": begin, "dur": duration, "args": about}


def recorded(folder, events):
    folder.mkdir(parents=True)
    with gzip.open(folder / "host.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)


def test_only_what_all_devices_wait_for_counts(tmp_path, capsys):
    """Microseconds: device 0 rests from 400 on, 1 before 300, both from 700 to 900."""
    of_host = {"ph": "X", "name": "read", "ts": 700, "dur": 200, "args": {}}
    events = [
        op(1, 300, 400),
        op(0, 0, 400),
        op(1, 100, 50),
        of_host,
        op(1, 900, 50),
        op(1, 950, 50),
    ]
    recorded(tmp_path / "profile" / "process-0", events)
    assert main(["idle", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said == "0.001 s recorded; no device worked in 20.00% of it; longest 0.20 ms\n"


@pytest.mark.parametrize(
    ("recordings", "message"),
    [
        ((), "has 0 recordings"),
        (([op(0, 0, 1)], [op(0, 0, 1)]), "has 2 recordings"),
        (([{"ph": "X", "name": "read", "ts": 0, "dur": 1, "args": {}}],), "no operation of a dev"),
    ],
)
def test_other_folders_are_refused(recordings, message, tmp_path, capsys):
    for number, events in enumerate(recordings):
        recorded(tmp_path / f"process-{number}", events)
    assert main(["idle", str(tmp_path)]) == 1
    assert message in capsys.readouterr().err
