"""A run of `python -m jaxpipe.train`: its start, its loop, and what it does between steps."""

from jaxpipe.run.run import Run

__all__ = ["Run"]
