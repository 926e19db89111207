"""Llama-style decoders: Llama 3 and Qwen3, dense."""
