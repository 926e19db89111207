"""Sizes of published models of the family, as their presets list them."""

Preset = dict[str, int | float | bool]


def decoder_sizes(layers: int, width: int, heads: int, kv_heads: int, ffn: int) -> Preset:
    """The sizes of a decoder, by the names of `[model]`."""
    return {
        "n_layers": layers,
        "d_model": width,
        "n_heads": heads,
        "n_kv_heads": kv_heads,
        "d_ff": ffn,
    }
