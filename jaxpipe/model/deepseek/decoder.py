"""A DeepSeek decoder as pure functions."""

from dataclasses import dataclass

from flax import nnx

from jaxpipe.model.deepseek.attention import LatentAttention
from jaxpipe.model.deepseek.config import DeepseekConfig
from jaxpipe.model.llama.decoder import LlamaDecoder
from jaxpipe.model.llama.layers import LlamaLayer
from jaxpipe.model.moe.experts import PRODUCTS
from jaxpipe.model.parts import Init, LayerParts


@dataclass(frozen=True)
class DeepseekDecoder(LlamaDecoder):
    """A Llama-style decoder with latent attention: DeepSeek-V2, DeepSeek-V3, Kimi-K2."""

    config: DeepseekConfig

    @property
    def products(self) -> tuple[str, ...]:
        """Names of a layer's weights, without the router's and those of grouped products."""
        queries = ("wq_a", "wq_b") if self.config.q_lora_rank else ("wq",)
        own = *queries, "wkv_a", "wkv_b", "wo", "w_gate", "w_up", "w_down"
        return (*own, *PRODUCTS) if self.config.capacity_factor else own

    def new_layer(self, kind: str, parts: LayerParts, init: Init) -> nnx.Module:
        """Build a layer of a kind as a module."""
        return LlamaLayer(kind, self.config, parts, init, LatentAttention)
