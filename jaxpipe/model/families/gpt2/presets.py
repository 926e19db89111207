"""The four GPT-2 models by name, with the sizes of their configurations."""


def _sizes(layers: int, width: int, heads: int) -> dict[str, int]:
    return {
        "n_layers": layers,
        "d_model": width,
        "n_heads": heads,
        "d_ff": 4 * width,
        "vocab_size": 50257,
    }


GPT2_PRESETS: dict[str, dict[str, int]] = {
    "gpt2": _sizes(12, 768, 12),
    "gpt2_medium": _sizes(24, 1024, 16),
    "gpt2_large": _sizes(36, 1280, 20),
    "gpt2_xl": _sizes(48, 1600, 25),
}
