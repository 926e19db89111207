"""Rotary positions: settings, rotation, and Hugging Face's `rope_scaling`."""
