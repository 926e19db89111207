"""Measurements of the running system: measured cost of a schedule against the simulator's."""
