"""The published architectures of the family `llama`, one module each.

To add one, write a module with a subclass of `LlamaFormat` and `PRESETS`, and list it here. A model
that several formats describe is exported in the first of them.
"""

from jaxpipe.model.families.llama.architectures import (
    llama3,
    mistral,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
)
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.family import ModelFamily

FORMATS = (
    llama3.Llama3Format(),
    mistral.MistralFormat(),
    qwen2.Qwen2Format(),
    qwen3.Qwen3Format(),
    qwen3_moe.Qwen3MoeFormat(),
    mixtral.MixtralFormat(),
)
_PRESETS = {
    name: fields
    for module in (llama3, mistral, mixtral, qwen2, qwen3, qwen3_moe)
    for name, fields in module.PRESETS.items()
}
LLAMA = ModelFamily("llama", LlamaConfig, _PRESETS, huggingface=__name__)
