"""The training step compiled for GPUs that are not there, and what can be read from the result."""
