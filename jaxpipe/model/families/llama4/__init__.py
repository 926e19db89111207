"""The text models of Llama 4: attention within chunks, layers without positions, and experts."""
