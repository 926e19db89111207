"""Timelines in pages: `python tests/support/timelines.py` redraws all of them.

Every `<!-- timeline NAME option=value ... -->` line of a page is followed by the timeline of that
schedule, up to `<!-- end -->`. The word `ticks` adds a line that numbers the ticks, and the word
`recompute_ahead` adds R.
"""

import re
from pathlib import Path

from jaxpipe.core.schedule import Costs, Lockstep, recompute_ahead
from jaxpipe.schedules import build, draw_timeline, fuse_steps

ROOT = Path(__file__).parents[2]
_LOCKSTEP = ("in_flight", "transfer_ticks")  # options of the timeline; the others are the builder's
_MARKED = re.compile(r"(<!-- timeline ([^>]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages():
    """Return every page of the project."""
    others = sorted(ROOT.glob("jaxpipe/**/*.md"))
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "tests" / "README.md", *others]


def redrawn(text):
    """Return the text with every marked timeline redrawn."""
    return _MARKED.sub(
        lambda found: f"{found[1]}\n```\n{marked_timeline(found[2])}\n```\n\n{found[3]}", text
    )


def marked_timeline(words):
    """Return the timeline of a marker.

    >>> print(marked_timeline("gpipe pp=2 microbatches=2 ticks"))
    tick     0  1  2  3   4   5
    rank 0 | F0 F1 .  .   BW0 BW1
    rank 1 | .  F0 F1 BW0 BW1 .
    """
    name, *rest = words.split()
    options = {key: int(value) for key, value in (w.split("=") for w in rest if "=" in w)}
    steps = options.pop("fused_steps", 0)
    lockstep = {key: options.pop(key) for key in _LOCKSTEP if key in options}
    schedule, how = build(name, **options), Lockstep(**lockstep)
    if "recompute_ahead" in rest:
        schedule, how = recompute_ahead(schedule, Costs(R=1.0), how)
    drawn = draw_timeline(fuse_steps(schedule, steps) if steps else schedule, how)
    return f"{_numbers(drawn)}\n{drawn}" if "ticks" in rest else drawn


def _numbers(drawn):
    """Return a line with the number of every tick above its column."""
    lines = drawn.splitlines()
    start = lines[0].index("|") + 2
    words = (match.start() for line in lines for match in re.finditer(r"\S+", line))
    header = "tick"
    for tick, column in enumerate(sorted({place for place in words if place >= start})):
        header = f"{header:{column}}{tick}"
    return header


if __name__ == "__main__":
    for page in pages():
        page.write_text(redrawn(page.read_text()))
