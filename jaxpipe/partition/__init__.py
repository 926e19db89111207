"""How parameters, layers and sequences are sharded over devices. Imports no jax."""
