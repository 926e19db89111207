"""Files of token ids: their formats, and documents in a fixed order."""
