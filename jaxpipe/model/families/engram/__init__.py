"""Llama's layers, some of which look up embeddings of the last tokens (DeepSeek-AI's Engram)."""
