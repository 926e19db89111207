"""Exact causal attention: over all keys, block by block, and over a sequence that devices share."""
