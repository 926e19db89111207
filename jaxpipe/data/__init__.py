"""Data: token files cut into samples, in an order that depends on (seed, position) alone.

numpy and grain; nothing here uses jax.
"""

from jaxpipe.data.batches import Batch, Split
from jaxpipe.data.sources import Data, open_data

__all__ = ["Batch", "Data", "Split", "open_data"]
