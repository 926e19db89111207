"""The four GPT-2 models by name, with the sizes of their configurations, and the family."""

from jaxpipe.model.families.gpt2.config import GPT2Config
from jaxpipe.model.family import ModelFamily


def _sizes(layers: int, width: int, heads: int) -> dict[str, int]:
    return {
        "n_layers": layers,
        "d_model": width,
        "n_heads": heads,
        "d_ff": 4 * width,
        "vocab_size": 50257,
    }


_PRESETS: dict[str, dict[str, int]] = {
    "gpt2": _sizes(12, 768, 12),
    "gpt2_medium": _sizes(24, 1024, 16),
    "gpt2_large": _sizes(36, 1280, 20),
    "gpt2_xl": _sizes(48, 1600, 25),
}
GPT2 = ModelFamily(
    "gpt2",
    GPT2Config,
    _PRESETS,
    model="jaxpipe.model.families.gpt2.decoder:GPT2",
    huggingface="jaxpipe.model.families.gpt2.huggingface",
)
