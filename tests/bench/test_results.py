"""Tables of measured steps: ratios within a round, refused arguments, and tables in files."""

from jaxpipe.bench.results import PeakMemory, StepMeasurements, StepResult, table


def result():
    seconds = [
        {"jaxpipe single": 10.0, "jaxpipe 1f1b": 8.0},
        {"jaxpipe single": 20.0, "jaxpipe 1f1b": 10.0, "torch single": 3.0},
        {"jaxpipe 1f1b": 1.0, "torch Schedule1F1B": 1.0},
    ]
    steps = StepMeasurements(
        microbatches=2, rounds=seconds, predicted=[{"1f1b": 4.0}, {}, {}],
        tried={"jaxpipe single": 3, "jaxpipe 1f1b": 3}, losses={}, compile={"jaxpipe 1f1b": 1.5},
        memory={"jaxpipe 1f1b": PeakMemory(2**21, 2**20)},
        busy=[
            {"jaxpipe single": 10.0, "jaxpipe 1f1b": 12.0},
            {"jaxpipe single": 20.0, "jaxpipe 1f1b": 15.0, "torch single": 3.0},
            {"jaxpipe 1f1b": 2.0, "torch Schedule1F1B": 1.5},
        ],
    )  # fmt: skip
    return StepResult("2026-01-01", "bench", {"jax": "1"}, "a machine", 100, [], [steps])


def test_ratios_are_within_a_round():
    steps = result().steps[0]
    assert steps.efficiency("jaxpipe", "1f1b") == [0.625, 1.0]
    assert steps.predicted_efficiency("1f1b") == [10 / 2 / 4]
    assert steps.promise_kept("1f1b") == [0.5]
    assert steps.bubble("jaxpipe 1f1b") == [0.25, 0.25, 0.0]
    assert steps.efficiency("torch", "Schedule1F1B") == []
    cells = "| 1f1b | 2 | 8.00 (1.00-10.00) | 25 | 0.812 (0.625-1.000) | 1.250 (1.250-1.250) |"
    assert cells in table(result())
    assert "its bubble" in table(result())
    (found := result()).steps[0].busy = []
    assert "bubble" not in table(found)  # it was not measured


def test_a_result_is_read_as_it_was_written(tmp_path):
    result().write(tmp_path / "one.json")
    assert StepResult.read(tmp_path / "one.json") == result()
