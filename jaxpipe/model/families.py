"""The families of models. To add one, write its package, as `gpt2` is, and an entry here."""

from jaxpipe.model.family import Family
from jaxpipe.model.gpt2.config import GPT2Config
from jaxpipe.model.gpt2.presets import GPT2_PRESETS
from jaxpipe.model.llama.config import LlamaConfig
from jaxpipe.model.llama.presets import LLAMA_PRESETS

FAMILIES = {
    family.name: family
    for family in (
        Family(
            "llama",
            LlamaConfig,
            LLAMA_PRESETS,
            model="jaxpipe.model.llama.decoder:Decoder",
            huggingface="jaxpipe.model.llama.huggingface",
        ),
        Family(
            "gpt2",
            GPT2Config,
            GPT2_PRESETS,
            model="jaxpipe.model.gpt2.decoder:GPT2",
            huggingface="jaxpipe.model.gpt2.huggingface",
        ),
    )
}

# Every published model by name: its family, and the fields of `[model]` that it has.
PRESETS = {
    name: {"family": family.name, **fields}
    for family in FAMILIES.values()
    for name, fields in family.presets.items()
}
