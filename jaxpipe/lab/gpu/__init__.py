"""Compile the training step for GPUs that are not present, and analyse the compiled program."""
