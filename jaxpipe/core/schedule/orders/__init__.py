"""Orders of a step's actions: looped, V-shaped, bidirectional, forwards only, and from a file."""
