"""Llama-style decoders: Llama 3, Qwen3 and Mistral, dense or with experts."""
