"""The text models of Gemma 3: Llama's layers with more norms, and windows in most layers."""
