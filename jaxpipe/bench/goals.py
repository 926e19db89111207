"""What is asked of the figures of `bench step`, and by how much they miss it."""

from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from jaxpipe.bench.options import markdown
from jaxpipe.bench.results import Result, Steps
from jaxpipe.bench.variants import VARIANTS


class Goal(NamedTuple):
    """A figure of every schedule that is to lie between two bounds, `least` and `most`."""

    what: str
    least: float
    most: float
    figures: Callable[[Steps], dict[str, float]]

    def excess(self, figure: float) -> float:
        """By what factor a figure is beyond its nearer bound; at most 1 where it is between."""
        return max(figure / self.most, self.least / figure)

    def verdict(self, steps: Steps) -> str:
        """How many schedules meet it, and the one that misses it most; empty if unmeasured."""
        figures = self.figures(steps)
        missed = {name: each for name, each in figures.items() if self.excess(each) > 1}
        if not figures:
            return ""
        met = f"{len(figures) - len(missed)} of {len(figures)}"
        if not missed:
            return met
        worst = max(missed, key=lambda name: self.excess(missed[name]))
        return f"{met}; {worst}: {missed[worst]:.3g}"


def _best(steps: Steps) -> dict[str, float]:
    ours = {name: steps.seconds(f"jaxpipe {name}") for name in steps.variants()}
    theirs = [steps.seconds(f"torch {VARIANTS[name].peer}") for name in ours]
    known = {name: median(seconds) for name, seconds in ours.items() if seconds}
    peers = [median(seconds) for seconds in theirs if seconds]
    if not known or not peers:
        return {}
    best = min(known, key=known.__getitem__)
    return {best: known[best] / min(peers)}


def _efficiency(steps: Steps) -> dict[str, float]:
    found = {}
    for name in steps.variants():
        ours = steps.efficiency("jaxpipe", name)
        theirs = steps.efficiency("torch", VARIANTS[name].peer)
        if ours and theirs:
            found[name] = median(ours) / median(theirs)
    return found


def _promise(steps: Steps) -> dict[str, float]:
    kept = {name: steps.promise_kept(name) for name in steps.variants()}
    return {name: 1 / median(each) for name, each in kept.items() if each}


def _compiled(steps: Steps) -> dict[str, float]:
    every = {name: steps.compile.get(f"jaxpipe {name}") for name in steps.variants()}
    return {name: seconds for name, seconds in every.items() if seconds is not None}


def _memory(steps: Steps) -> dict[str, float]:
    """GPipe holds every microbatch by its nature."""
    peer = steps.memory.get("torch Schedule1F1B")
    ours = {name: steps.memory.get(f"jaxpipe {name}") for name in steps.variants()}
    return {
        name: own.peak / peer.peak for name, own in ours.items() if own and peer and name != "gpipe"
    }


_ANY = float("inf")
GOALS = (
    Goal("best step, over PyTorch's best step: at most 1", 0, 1, _best),
    Goal("efficiency, over that of PyTorch's schedule: at least 1", 1, _ANY, _efficiency),
    Goal("step, over what the simulator says: 0.95 to 1.05", 0.95, 1.05, _promise),
    Goal("compiled in 10 s", 0, 10, _compiled),
    Goal("memory, over that of PyTorch's 1F1B: at most 1", 0, 1, _memory),
)


def goals_table(result: Result) -> str:
    """In markdown: of each goal how many schedules meet it, by microbatches, and the worst miss."""
    header = ["asked of every schedule", *(f"M = {steps.microbatches}" for steps in result.steps)]
    rows = [[goal.what, *(goal.verdict(steps) for steps in result.steps)] for goal in GOALS]
    return markdown(header, [row for row in rows if any(row[1:])])
