"""Names and fields at Hugging Face that decoders with a recurrence share."""

import math
from typing import Any, ClassVar

from jaxpipe.model.families.llama.huggingface import FULL, Fields, LlamaFormat, Names, choices
from jaxpipe.model.published import HuggingFaceTensor, fused
from jaxpipe.model.recurrent.config import HybridConfig, is_linear
from jaxpipe.model.recurrent.mamba_config import MambaConfig

LINEAR = "linear_attention"  # an entry of `layer_types`


def layer_types(model: HybridConfig) -> list[str]:
    """The type of every layer."""
    return [LINEAR if is_linear(kind) else FULL for kind in model.layer_kinds]


def attention_every(theirs: Fields) -> int:
    """One layer in this many has attention, by a config.json with all defaults filled in."""
    types = theirs.get("layer_types")
    if not types:
        return theirs["full_attention_interval"]
    return (types.index(FULL) if FULL in types else len(types)) + 1


def check_regular(theirs: Fields, found: Fields) -> None:
    """Raise `ValueError` where layers with attention are not at regular intervals."""
    every, types = found["attention_every"], theirs.get("layer_types")
    regular = [FULL if i % every == 0 else LINEAR for i in range(1, found["n_layers"] + 1)]
    if types and types != regular:
        raise ValueError(
            f"has layer_types that are not {LINEAR} with {FULL} in every n-th layer, as in "
            f"this model: take another checkpoint."
        )


def mamba_names(prefix: str) -> Names:
    """Where the parameters of Mamba-2 are, in tensors whose names begin with `prefix`."""
    taps = HuggingFaceTensor(f"{prefix}conv1d.weight", transposed=True, ones=(1,))
    bias = HuggingFaceTensor(f"{prefix}conv1d.bias")
    return {
        **fused(
            f"{prefix}in_proj.weight", "mamba/wz", "mamba/wx", "mamba/wb", "mamba/wc", "mamba/step"
        ),
        **{f"mamba/conv_{one}": taps._replace(part=i) for i, one in enumerate("xbc")},
        **{f"mamba/conv_{one}_bias": bias._replace(part=i) for i, one in enumerate("xbc")},
        "mamba/step_bias": HuggingFaceTensor(f"{prefix}dt_bias"),
        "mamba/log_decay": HuggingFaceTensor(f"{prefix}A_log"),
        "mamba/skip": HuggingFaceTensor(f"{prefix}D"),
        "mamba/norm_scale": HuggingFaceTensor(f"{prefix}norm.weight"),
        "mamba/wo": HuggingFaceTensor(f"{prefix}out_proj.weight", transposed=True),
    }


def without_positions(fields: Fields) -> dict[str, Any]:
    """The fields of a config.json, or of `[model]`, without those of rotary positions."""
    return {name: value for name, value in fields.items() if not name.startswith("rope_")}


class MambaFormat(LlamaFormat):
    """How transformers stores a Llama-style decoder some of whose layers have Mamba-2.

    A subclass says by `pattern` and `written_pattern` which layers these are.
    """

    LAYER: ClassVar[Names] = {**LlamaFormat.LAYER, **mamba_names("mamba.")}
    FIELDS: ClassVar[Fields] = {
        "mamba_n_heads": "mamba_heads",
        "mamba_d_head": "mamba_head_dim",
        "mamba_n_groups": "mamba_groups",
        "mamba_d_state": "mamba_state",
        "mamba_d_conv": "mamba_taps",
    }
    DEFAULTS: ClassVar[Fields] = {
        "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 256,
        "mamba_d_conv": 4, "mamba_expand": 2,
    }  # fmt: skip
    CHOICES: ClassVar[Fields] = choices("n_experts", mamba_step_min=0.0)
    ABSENT: ClassVar[Fields] = {
        **LlamaFormat.ABSENT, "mamba_conv_bias": (True,), "mamba_proj_bias": (False,),
        "time_step_limit": (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}]),
    }  # fmt: skip
    READ: ClassVar[tuple[str, ...]] = ("mamba_chunk_size", "layers_block_type")
    WRITTEN: ClassVar[Fields] = {**LlamaFormat.WRITTEN, "mamba_conv_bias": True}

    def with_defaults(self, theirs: Fields) -> Fields:
        """A config.json with transformers' defaults for absent fields, and the width of a head."""
        found = dict(super().with_defaults(theirs))
        width = found["mamba_expand"] * found["hidden_size"]
        if found["mamba_d_head"] == "auto":
            found["mamba_d_head"] = width // found["mamba_n_heads"]
        if found["mamba_d_head"] * found["mamba_n_heads"] != width:
            raise ValueError(
                f"has mamba_n_heads={found['mamba_n_heads']} of mamba_d_head="
                f"{found['mamba_d_head']}, which are not mamba_expand x hidden_size={width} "
                f"together: take the whole file."
            )
        return found

    def check_types(self, theirs: Fields, found: Fields) -> None:
        """Accept the types of layers, which `pattern` has read."""

    def own_expected(self, theirs: Fields) -> dict[str, Any]:
        """The kinds of layers."""
        return {"layer_pattern": self.pattern(theirs)}

    def own_written(self, model: MambaConfig) -> dict[str, Any]:
        """The kinds of layers, and the width of Mamba-2 as a multiple of the model's."""
        expand, rest = divmod(model.mamba_widths[0], model.d_model)
        if rest:
            raise ValueError(
                f"model.mamba_heads={model.mamba_heads} x model.mamba_head_dim="
                f"{model.mamba_head_dim} is no multiple of model.d_model={model.d_model}, as in "
                f"{self.MODELS}: it cannot be exported."
            )
        own = {"mamba_expand": expand, "mamba_chunk_size": model.mamba_chunk}
        return own | self.written_pattern(model)

    def pattern(self, theirs: Fields) -> str:
        """The letters of all layers, by a config.json with all defaults filled in."""
        raise NotImplementedError

    def written_pattern(self, model: MambaConfig) -> dict[str, Any]:
        """The fields of a config.json that say which layers have attention."""
        raise NotImplementedError
