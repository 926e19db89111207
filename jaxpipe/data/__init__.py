"""Data: documents of token ids made into samples, whose order depends on (seed, position) alone.

`sources` opens what a run reads. Nothing is imported here: the processes that prepare text need
neither grain nor jax.
"""
