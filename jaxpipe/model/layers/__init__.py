"""Parts of layers that families share."""
