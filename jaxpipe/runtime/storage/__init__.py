"""Files on disks and in object stores, the run directory, and what to do when they fail."""
