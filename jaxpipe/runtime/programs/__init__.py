"""XLA's options, and compiled programs on disk."""
