"""The model families. To add one, write a package like `gpt2` and add an entry here."""

from jaxpipe.model.deepseek.config import DeepseekConfig
from jaxpipe.model.deepseek.presets import DEEPSEEK_PRESETS
from jaxpipe.model.family import ModelFamily
from jaxpipe.model.gemma3 import config as gemma3
from jaxpipe.model.gpt2.config import GPT2Config
from jaxpipe.model.gpt2.presets import GPT2_PRESETS
from jaxpipe.model.gpt_oss import config as gpt_oss
from jaxpipe.model.llama import architectures as llama
from jaxpipe.model.llama.config import LlamaConfig
from jaxpipe.model.llama4 import config as llama4

FAMILIES = {
    family.name: family
    for family in (
        ModelFamily(
            "llama",
            LlamaConfig,
            llama.PRESETS,
            model="jaxpipe.model.llama.decoder:LlamaDecoder",
            huggingface="jaxpipe.model.llama.architectures",
        ),
        ModelFamily(
            "gemma3",
            gemma3.Gemma3Config,
            gemma3.PRESETS,
            model="jaxpipe.model.llama.decoder:LlamaDecoder",
            huggingface="jaxpipe.model.gemma3.huggingface",
        ),
        ModelFamily(
            "gpt_oss",
            gpt_oss.GptOssConfig,
            gpt_oss.PRESETS,
            model="jaxpipe.model.llama.decoder:LlamaDecoder",
            huggingface="jaxpipe.model.gpt_oss.huggingface",
        ),
        ModelFamily(
            "llama4",
            llama4.Llama4Config,
            llama4.PRESETS,
            model="jaxpipe.model.llama4.decoder:Llama4Decoder",
            huggingface="jaxpipe.model.llama4.huggingface",
        ),
        ModelFamily(
            "deepseek",
            DeepseekConfig,
            DEEPSEEK_PRESETS,
            model="jaxpipe.model.deepseek.decoder:DeepseekDecoder",
            huggingface="jaxpipe.model.deepseek.huggingface",
        ),
        ModelFamily(
            "gpt2",
            GPT2Config,
            GPT2_PRESETS,
            model="jaxpipe.model.gpt2.decoder:GPT2",
            huggingface="jaxpipe.model.gpt2.huggingface",
        ),
    )
}

# Published models by name: the family, and the fields of `[model]` that the preset fills.
PRESETS = {
    name: {"family": family.name, **fields}
    for family in FAMILIES.values()
    for name, fields in family.presets.items()
}
