"""What recorded and simulated steps cost, and their pictures."""
