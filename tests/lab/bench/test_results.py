"""The table of measured steps: its ratios are within a round."""

from jaxpipe.lab.bench.results import MeasuredStep, table


def test_ratios_are_within_a_round():
    step = MeasuredStep(
        "jaxpipe", "1f1b:in_flight=3", 2, compile=1.5, seconds={0: 8.0, 1: 10.0, 2: 1.0},
        busy={0: 12.0, 1: 15.0, 2: 2.0}, predicted={0: 4.0},
    )  # fmt: skip
    steps = [
        MeasuredStep("jaxpipe", "single", 2, seconds={0: 10.0, 1: 20.0}),
        step,
        MeasuredStep("torch", "single", 2, seconds={1: 3.0}),
        MeasuredStep("torch", "Schedule1F1B", 2, seconds={2: 1.0}, busy={2: 1.5}),
    ]
    said = table(steps, 100)
    cells = (
        "| 1f1b:in_flight=3 | 2 | 8.00 (1.00-10.00) | 25 | 0.812 (0.625-1.000) | "
        "1.250 (1.250-1.250) | 0.500 (0.500-0.500) | 0.250 (0.000-0.250) | 1.5 | "
        "1.00 (1.00-1.00) | 0.250 (0.250-0.250) |"
    )
    assert cells in said
    step.busy = steps[3].busy = {}
    assert "bubble" not in table(steps, 100)  # it was not measured
