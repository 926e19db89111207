"""GPT-2: learned positions, LayerNorm, GELU, biases everywhere, a head that is the embedding."""
