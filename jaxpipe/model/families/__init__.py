"""The model families. To add one, write a module like `glm4` or a package like `gpt2`."""

from jaxpipe.model.families.bamba import BAMBA
from jaxpipe.model.families.deepseek.presets import DEEPSEEK
from jaxpipe.model.families.deepseek_v4.config import DEEPSEEK_V4
from jaxpipe.model.families.engram.config import ENGRAM
from jaxpipe.model.families.ernie4_5_moe import ERNIE4_5_MOE
from jaxpipe.model.families.exaone4 import EXAONE4
from jaxpipe.model.families.gemma3.config import GEMMA3
from jaxpipe.model.families.glm4 import GLM4
from jaxpipe.model.families.glm4_moe import GLM4_MOE
from jaxpipe.model.families.gpt2.presets import GPT2
from jaxpipe.model.families.gpt_oss.config import GPT_OSS
from jaxpipe.model.families.granite_hybrid.config import GRANITE_HYBRID
from jaxpipe.model.families.kimi_linear.config import KIMI_LINEAR
from jaxpipe.model.families.llama.architectures import LLAMA
from jaxpipe.model.families.llama4.config import LLAMA4
from jaxpipe.model.families.minimax_m2 import MINIMAX_M2
from jaxpipe.model.families.nemotron_h.config import NEMOTRON_H
from jaxpipe.model.families.olmo2 import OLMO2
from jaxpipe.model.families.olmo3 import OLMO3
from jaxpipe.model.families.olmo_hybrid.config import OLMO_HYBRID
from jaxpipe.model.families.phi3 import PHI3
from jaxpipe.model.families.qwen3_5 import QWEN3_5
from jaxpipe.model.families.qwen3_next.config import QWEN3_NEXT
from jaxpipe.model.families.seed_oss import SEED_OSS

FAMILIES = {
    family.name: family
    for family in (
        LLAMA, GEMMA3, GPT_OSS, LLAMA4, OLMO2, OLMO3, GLM4, PHI3, GLM4_MOE, MINIMAX_M2, SEED_OSS,
        EXAONE4, ERNIE4_5_MOE, QWEN3_NEXT, QWEN3_5, OLMO_HYBRID, NEMOTRON_H, BAMBA, GRANITE_HYBRID,
        DEEPSEEK, DEEPSEEK_V4, KIMI_LINEAR, ENGRAM, GPT2,
    )
}  # fmt: skip

# Published models by name: the family, and the fields of `[model]` that the preset fills.
PRESETS = {
    name: {"family": family.name, **fields}
    for family in FAMILIES.values()
    for name, fields in family.presets.items()
}
