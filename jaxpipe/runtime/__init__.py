"""What a program runs on: settings made before jax starts, devices, processes, XLA options."""
