"""A search for the fastest mesh, schedule and memory settings."""
