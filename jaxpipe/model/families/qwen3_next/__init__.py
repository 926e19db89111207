"""Qwen3-Next: gated delta networks, and gated attention in every fourth layer."""
