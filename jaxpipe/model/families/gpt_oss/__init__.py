"""gpt-oss: Llama's layers with attention sinks, biases, and experts with a clamped gate."""
