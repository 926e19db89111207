"""Token mixers with a state of constant size: recurrences in chunks, and short convolutions."""
