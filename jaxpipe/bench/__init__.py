"""Measurements of the running system: what a schedule costs beside what the simulator says."""
