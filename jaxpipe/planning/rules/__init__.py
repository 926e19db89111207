"""The rules across settings, which are checked before every run."""
