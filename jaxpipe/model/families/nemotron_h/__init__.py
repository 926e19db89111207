"""Nemotron-H: every layer has one of Mamba-2, attention, an MLP or experts."""
