"""A DeepSeek decoder in which most layers have Kimi delta attention instead of latent attention."""

from dataclasses import dataclass

from flax import nnx

from jaxpipe.model.families.deepseek.decoder import DeepseekDecoder
from jaxpipe.model.families.kimi_linear.config import KimiLinearConfig
from jaxpipe.model.families.llama.layers import LlamaLayer
from jaxpipe.model.families.qwen3_next.config import is_linear
from jaxpipe.model.families.qwen3_next.decoder import HybridStates
from jaxpipe.model.layers.parts import Init
from jaxpipe.model.options import LayerParts
from jaxpipe.model.recurrent.kimi_delta import KimiDeltaAttention


@dataclass(frozen=True)
class KimiLinearDecoder(HybridStates, DeepseekDecoder):
    """A DeepSeek decoder whose `linear_` layers have `KimiDeltaAttention`."""

    config: KimiLinearConfig

    @property
    def products(self) -> tuple[str, ...]:
        """Names of a layer's weights, without those of routers, rates, decays and gates."""
        return tuple(dict.fromkeys((*super().products, "wq", "wk", "wv")))

    def new_layer(self, kind: str, parts: LayerParts, init: Init) -> nnx.Module:
        """Build a layer of a kind as a module."""
        if is_linear(kind):
            return LlamaLayer(kind, self.config, parts, init, KimiDeltaAttention)
        return super().new_layer(kind, parts, init)
