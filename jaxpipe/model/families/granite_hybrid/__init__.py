"""Granite 4.0 H: Mamba-2 in most layers, and factors on embeddings, sublayers and logits."""
