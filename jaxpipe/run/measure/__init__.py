"""Measurements during a run: times of ops, the bubble, and slow processes."""
