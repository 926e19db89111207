"""Token files and text as samples and batches, in an order that depends on (seed, position) alone.

`sources.open_data` opens the data of a run. This module imports nothing, because the processes
that prepare text need neither grain nor jax.
"""
