"""How parameters, layers and sequences are divided among devices. Nothing here needs jax."""
