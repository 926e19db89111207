"""Kimi Linear: Kimi delta attention, latent attention without positions, and experts."""
