"""Agreement of processes on where to stop, and on one that is gone, with an in-process service."""

import contextlib
import itertools
import random
import signal
import sys
import threading
import time

import jax
import pytest
from commands import start
from several import ends, free_port

from jaxpipe.config import ConfigError
from jaxpipe.runtime import coordination
from jaxpipe.runtime.coordination import DivergedError, Service, Watch
from jaxpipe.runtime.exit_code import ExitCode
from jaxpipe.runtime.group import Group


class Store:
    """An in-process coordination service with the client's interface, for `count` processes."""

    def __init__(self, count):
        self.count, self.values, self.changed = count, {}, threading.Condition()
        self.barriers = {}

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.changed:
            if key in self.values and not allow_overwrite:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, milliseconds):
        self._wait(lambda: key in self.values, milliseconds)
        return self.values[key]

    def key_value_dir_get(self, folder):
        with self.changed:
            return [pair for pair in self.values.items() if pair[0].startswith(folder)]

    def key_value_delete(self, key):
        with self.changed:
            del self.values[key]

    def wait_at_barrier(self, name, milliseconds):
        with self.changed:
            self.barriers[name] = self.barriers.get(name, 0) + 1
            self.changed.notify_all()
        self._wait(lambda: self.barriers[name] >= self.count, milliseconds)

    def _wait(self, condition, milliseconds):
        with self.changed:
            if not self.changed.wait_for(condition, min(milliseconds / 1000, 1e6)):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: it did not come")


def services(count):
    store = Store(count)
    for index in range(count):
        service = Service.__new__(Service)
        service.client, service.index, service.count = store, index, count
        service._calls, service._previous = itertools.count(), None
        yield service


@pytest.fixture
def left(monkeypatch):
    """Return the exit codes of processes; here leaving ends their thread."""
    codes = []

    def leave(code):
        codes.append(code)
        sys.exit(code)

    monkeypatch.setattr(coordination.os, "_exit", leave)
    monkeypatch.setattr(coordination, "_PERIOD", 0.05)
    monkeypatch.setattr(coordination, "_LINGER", 0.1)
    return codes


def in_threads(functions):
    def run(function):
        with contextlib.suppress(SystemExit):  # its process ended
            function()

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


SIGTERM = 128 + signal.SIGTERM  # the exit code


@pytest.mark.parametrize("seed", range(30))
def test_all_stop_after_the_same_step(left, seed):
    """However far apart they are, whoever wants to stop, and when: also twice, or too late."""
    chance = random.Random(seed)
    count, last = chance.choice([2, 3, 5]), 12
    asked = {chance.randrange(count): chance.randint(1, last) for _ in range(chance.randint(1, 2))}
    stops = {}

    def run(service):
        watch, own = Watch(service), random.Random(f"{seed} {service.index}")
        watch.start()
        for step in range(1, last + 1):
            time.sleep(own.choice([0, 0, 0.01]))
            wanted = SIGTERM if step >= asked.get(service.index, last + 1) else 0
            if code := watch.reached(step, wanted):
                stops[service.index] = step, code
                break
        watch.finish()
        assert not watch.is_alive()

    in_threads([lambda service=service: run(service) for service in services(count)])
    assert left == []
    assert len(set(stops.values())) <= 1
    assert len(stops) in (0, count)
    if stops:
        assert stops[0][1] == SIGTERM
        assert stops[0][0] >= min(asked.values())


def test_what_is_gathered_is_in_the_order_of_processes(left):
    found = {}

    def run(service):
        first = service.gather("a", str(10 * service.index))
        second = service.gather("a", str(20 * service.index))
        found[service.index] = first, second
        service.wait("end")
        assert len(service.client.values) == service.count  # the first are not kept

    in_threads([lambda service=service: run(service) for service in services(12)])
    want = [str(10 * i) for i in range(12)], [str(20 * i) for i in range(12)]
    assert all(pair == want for pair in found.values())


def test_processes_that_diverge_stop_with_both_names(left):
    """One saves where the others wait: each of them meets the others at the same number."""
    found = {}

    def run(service):
        group = Group(service)
        group.barrier("start")
        try:
            group.barrier("save") if group.index == 2 else group.largest("step", group.index)
        except DivergedError as error:
            found[group.index] = str(error)

    in_threads([lambda service=service: run(service) for service in services(3)])
    assert set(found) == {0, 1, 2}
    for sentence in found.values():
        assert sentence.startswith("process 2 is at 'save' while process 0 is at 'step'")


def test_the_first_process_runs_before_the_others(left):
    order = []

    def run(service):
        group = Group(service)
        time.sleep(0.1 * group.is_first)
        with group.first_before_others("data"):
            order.append(group.index)
        assert group.from_first("word", lambda: f"of {group.index}") == "of 0"
        assert group.largest("number", 3 * group.index) == 6
        with pytest.raises(ConfigError, match="of 1"):
            group.refuse("bad", "of 1" if group.index == 1 else "")

    in_threads([lambda service=service: run(service) for service in services(3)])
    assert order[0] == 0
    assert sorted(order) == [0, 1, 2]


def test_one_process_is_a_group_of_its_own():
    group = Group()
    assert (group.index, group.count, group.is_first) == (0, 1, True)
    assert group.gather("a", "text") == ["text"]
    assert group.any("b", True)
    with pytest.raises(ConfigError, match="no"):
        group.refuse("c", "no")


@pytest.mark.parametrize(
    ("news", "code", "sentence"),
    [
        ({"stop": 1067861178}, 3, "asked to stop with exit code 1067861178, which is none"),
        ({"gone": 0, "code": 2, "reason": "a bad id"}, 2, "process 0 ended: a bad id\n"),
        ({"gone": 0, "code": 3, "reason": "out of memory"}, 3, "process 0 ended: out of memory; "),
    ],
)
def test_what_ends_a_process(left, capfd, news, code, sentence):
    first, second = services(2)
    Watch(first)._publish(news)
    in_threads([Watch(second).run])
    assert left == [code]
    assert sentence in capfd.readouterr().err


def test_a_hang_that_one_process_finds_ends_all_with_its_sentence(left, capfd):
    """The others write their stacks first; the one that tells them has written its own."""
    first, second, third = map(Watch, services(3))
    written = []
    for watch in (first, second, third):
        watch.last_words = lambda watch=watch: written.append(watch.service.index)
    in_threads([lambda: second.leave(ExitCode.HANG, "process 1 is stuck"), first.run, third.run])
    assert left == [ExitCode.HANG] * 3
    assert sorted(written) == [0, 2]
    assert capfd.readouterr().err.count("error: process 1 is stuck; the same command") == 3


def test_one_that_gives_no_sign_of_life_ends_the_others(left, capfd, monkeypatch):
    monkeypatch.setattr(coordination, "SILENT_SECONDS", 0.3)
    first, second, third = services(3)
    Watch(third)._live()  # once
    in_threads([Watch(first).run, Watch(second).run])
    assert left == [3, 3]
    assert capfd.readouterr().err.count("process 2 ended: no sign of life for 0.3 seconds") == 2


def test_where_the_service_is_gone_a_process_ends(left, capfd, monkeypatch):
    def gone(*_):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: Socket closed\nmore of it")

    (service,) = services(1)
    monkeypatch.setattr(service.client, "blocking_key_value_get", gone, raising=False)
    in_threads([Watch(service).run])
    assert left == [3]
    assert "process 0, at which the others meet, cannot be reached" in capfd.readouterr().err


INTRUDER = "another program has connected to JAX_COORDINATOR_ADDRESS as process 1 of this run"


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("INTERNAL: 1 unexpectedly tried to connect with a different incarnation.", [3]),
        ("CANCELLED: the client is shut down", []),
    ],
)
def test_what_a_barrier_says_of_an_intruder_ends_a_process(left, capfd, monkeypatch, text, codes):
    def fail(*_):
        raise jax.errors.JaxRuntimeError(text)

    (service,) = services(1)
    monkeypatch.setattr(service.client, "wait_at_barrier", fail, raising=False)
    in_threads([Watch(service)._await_intruder])
    assert left == codes
    assert capfd.readouterr().err.count(INTRUDER) == len(codes)


WAITS = """
import time
from jaxpipe.runtime import processes
processes.join()
print("met", flush=True)
time.sleep(60)
"""


@pytest.mark.extended
def test_a_program_that_connects_as_a_process_of_the_run_is_named():
    """jax aborts all, and tells the reason only to those that wait at a barrier."""
    places = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": "3"}

    def process(index):
        return start([sys.executable, "-c", WAITS], places | {"JAX_PROCESS_ID": index})

    group = [process(index) for index in "012"]
    assert [one.stdout.readline() for one in group] == ["met\n"] * 3
    intruder = process("1")
    try:
        for code, output in ends(group, 60):
            assert code == 3, output
            assert INTRUDER in output
    finally:
        intruder.kill()
        intruder.communicate()
