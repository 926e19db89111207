"""GPT-2: learned positions, LayerNorm, GELU, biases everywhere, a tied head."""
