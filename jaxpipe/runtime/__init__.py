"""What a program runs on and with: devices, processes, the options of XLA."""
