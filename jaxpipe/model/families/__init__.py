"""The model families. To add one, write a package like `gpt2` and add an entry here."""

from jaxpipe.model.families.deepseek.config import DeepseekConfig
from jaxpipe.model.families.deepseek.presets import DEEPSEEK_PRESETS
from jaxpipe.model.families.exaone4 import EXAONE4
from jaxpipe.model.families.gemma3 import config as gemma3
from jaxpipe.model.families.glm4 import GLM4
from jaxpipe.model.families.glm4_moe import GLM4_MOE
from jaxpipe.model.families.gpt2.config import GPT2Config
from jaxpipe.model.families.gpt2.presets import GPT2_PRESETS
from jaxpipe.model.families.gpt_oss import config as gpt_oss
from jaxpipe.model.families.llama import architectures as llama
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.families.llama4 import config as llama4
from jaxpipe.model.families.minimax_m2 import MINIMAX_M2
from jaxpipe.model.families.olmo2 import OLMO2
from jaxpipe.model.families.olmo3 import OLMO3
from jaxpipe.model.families.phi3 import PHI3
from jaxpipe.model.families.seed_oss import SEED_OSS
from jaxpipe.model.family import ModelFamily

FAMILIES = {
    family.name: family
    for family in (
        ModelFamily(
            "llama",
            LlamaConfig,
            llama.PRESETS,
            huggingface="jaxpipe.model.families.llama.architectures",
        ),
        ModelFamily(
            "gemma3",
            gemma3.Gemma3Config,
            gemma3.PRESETS,
            huggingface="jaxpipe.model.families.gemma3.huggingface",
        ),
        ModelFamily(
            "gpt_oss",
            gpt_oss.GptOssConfig,
            gpt_oss.PRESETS,
            huggingface="jaxpipe.model.families.gpt_oss.huggingface",
        ),
        ModelFamily(
            "llama4",
            llama4.Llama4Config,
            llama4.PRESETS,
            model="jaxpipe.model.families.llama4.decoder:Llama4Decoder",
            huggingface="jaxpipe.model.families.llama4.huggingface",
        ),
        OLMO2,
        OLMO3,
        GLM4,
        PHI3,
        GLM4_MOE,
        MINIMAX_M2,
        SEED_OSS,
        EXAONE4,
        ModelFamily(
            "deepseek",
            DeepseekConfig,
            DEEPSEEK_PRESETS,
            model="jaxpipe.model.families.deepseek.decoder:DeepseekDecoder",
            huggingface="jaxpipe.model.families.deepseek.huggingface",
        ),
        ModelFamily(
            "gpt2",
            GPT2Config,
            GPT2_PRESETS,
            model="jaxpipe.model.families.gpt2.decoder:GPT2",
            huggingface="jaxpipe.model.families.gpt2.huggingface",
        ),
    )
}

# Published models by name: the family, and the fields of `[model]` that the preset fills.
PRESETS = {
    name: {"family": family.name, **fields}
    for family in FAMILIES.values()
    for name, fields in family.presets.items()
}
