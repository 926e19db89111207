"""Names at Hugging Face of the layer that predicts one further token.

DeepSeek-V3, GLM-4.5 and GLM-5 have it after the last layer. Their files also hold copies of
embedding and head there, which are read nowhere and not written. Qwen3-Next and Qwen3.5 have it
apart from the layers, under `mtp.`.
"""

import re
from collections.abc import Mapping

from jaxpipe.model.prediction.config import PredictingConfig
from jaxpipe.model.published import HuggingFaceTensor

_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
_OWN = {
    "token_norm/scale": HuggingFaceTensor("enorm.weight"),
    "stream_norm/scale": HuggingFaceTensor("hnorm.weight"),
    "merge": HuggingFaceTensor("eh_proj.weight", transposed=True),
    "norm/scale": HuggingFaceTensor("shared_head.norm.weight"),
}
APART = "mtp."
_OWN_APART = {
    "token_norm/scale": HuggingFaceTensor("pre_fc_norm_embedding.weight"),
    "stream_norm/scale": HuggingFaceTensor("pre_fc_norm_hidden.weight"),
    "merge": HuggingFaceTensor("fc.weight", transposed=True),
    "norm/scale": HuggingFaceTensor("norm.weight"),
}


def with_prediction(layer: Mapping[str, HuggingFaceTensor]) -> dict[str, HuggingFaceTensor]:
    """Where the parameters of a layer are, and those of the layer that predicts a token."""
    ahead = _OWN | {f"block/{path}": tensor for path, tensor in layer.items()}
    return {**layer, **{f"depth_0/{path}": tensor for path, tensor in ahead.items()}}


def apart(block: Mapping[str, HuggingFaceTensor]) -> dict[str, HuggingFaceTensor]:
    """Where the parameters of a block are in a layer that is apart from the others."""
    return {
        f"depth_0/block/{path}": tensor.within(f"{APART}layers.0.")._replace(is_full_name=True)
        for path, tensor in block.items()
    }


def with_prediction_apart(
    layer: Mapping[str, HuggingFaceTensor],
) -> dict[str, HuggingFaceTensor]:
    """Where the parameters of a layer are, and of the layer apart that predicts a token."""
    own = {
        f"depth_0/{path}": tensor.within(APART)._replace(is_full_name=True)
        for path, tensor in _OWN_APART.items()
    }
    return {**layer, **own, **apart(layer)}


def ignores(name: str, model: PredictingConfig) -> bool:
    """Whether a tensor is of a layer that predicts further tokens, and is not the model's."""
    layer = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
    if layer is None or int(layer[1]) < model.n_layers:
        return False
    return int(layer[1]) >= model.blocks or name.endswith(_COPIES)


def check_depth(model: PredictingConfig) -> None:
    """Raise `ValueError` with a sentence where a model predicts more than one further token."""
    if model.mtp_depth > 1:
        raise ValueError(
            f"model.mtp_depth={model.mtp_depth}: published files have one further token at most: "
            f"it cannot be exported."
        )
