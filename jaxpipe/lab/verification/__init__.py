"""Proves on virtual CPU devices that a run's settings compute the numbers of one device."""
