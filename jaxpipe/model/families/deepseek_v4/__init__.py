"""DeepSeek-V4: hyper-connections, and attention to compressed entries."""
