"""Text made into shards of token ids. Needs the extra `data`, and neither grain nor jax."""
