"""A run: its state and steps, where it begins, its loop, what it shows and logs."""
