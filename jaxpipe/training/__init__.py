"""A training run: state, compiled steps, start, loop, optimizer and logs."""
