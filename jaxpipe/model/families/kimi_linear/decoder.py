"""A DeepSeek decoder in which most layers have Kimi delta attention instead of latent attention."""

from dataclasses import dataclass
from typing import ClassVar

from jaxpipe.model.families.deepseek.decoder import DeepseekDecoder
from jaxpipe.model.families.kimi_linear.config import KimiLinearConfig
from jaxpipe.model.recurrent.decoder import DeltaDecoder, Recurrence
from jaxpipe.model.recurrent.kimi_delta import KimiDeltaAttention


@dataclass(frozen=True)
class KimiLinearDecoder(DeltaDecoder, DeepseekDecoder):
    """A DeepSeek decoder whose `linear_` layers have `KimiDeltaAttention`."""

    config: KimiLinearConfig
    recurrence: ClassVar[Recurrence] = KimiDeltaAttention
