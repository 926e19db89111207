"""The families of models. To add one, write its package, as `llama` is, and an entry here."""

from jaxpipe.model.family import Family
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
    )
}

# Every published model by name: its family, and the fields of `[model]` that it has.
PRESETS = {
    name: {"family": family.name, **fields}
    for family in FAMILIES.values()
    for name, fields in family.presets.items()
}
