"""Checkpoints and adapters of Hugging Face, in and out."""
