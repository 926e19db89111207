"""Bamba (IBM, Princeton, UIUC 2024): a Llama most of whose layers have Mamba-2 for attention."""

from typing import Any, ClassVar

from jaxpipe.model.families.llama.config import Share
from jaxpipe.model.families.llama.huggingface import Fields, Names, choices
from jaxpipe.model.families.llama.presets import decoder_sizes
from jaxpipe.model.family import ModelFamily
from jaxpipe.model.published import HuggingFaceTensor
from jaxpipe.model.recurrent.huggingface import MambaFormat
from jaxpipe.model.recurrent.mamba_config import MambaConfig


class BambaConfig(MambaConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[model]`: a Bamba, by preset or by size; most layers have Mamba-2."""

    family: str = "bamba"
    rotary_share: Share = 0.5


class BambaFormat(MambaFormat):
    """`BambaForCausalLM`."""

    ARCHITECTURES: ClassVar[tuple[str, ...]] = ("BambaForCausalLM",)
    MODEL_TYPE: ClassVar[str] = "bamba"
    MODELS: ClassVar[str] = "a Bamba"
    LAYER: ClassVar[Names] = {
        **MambaFormat.LAYER,
        "mlp_norm/scale": HuggingFaceTensor("pre_ff_layernorm.weight"),
        **{
            f"mlp/w_{one}": HuggingFaceTensor(f"feed_forward.{one}_proj.weight", transposed=True)
            for one in ("gate", "up", "down")
        },
    }
    ENDS: ClassVar[Names] = {
        **MambaFormat.ENDS,
        "final_norm/scale": HuggingFaceTensor("model.final_layernorm.weight"),
    }
    DEFAULTS: ClassVar[Fields] = {
        **MambaFormat.DEFAULTS, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "attn_layer_indices": None,
    }  # fmt: skip
    CHOICES: ClassVar[Fields] = choices(rotary_share=0.5, mamba_step_min=0.0)
    READ: ClassVar[tuple[str, ...]] = (  # of a loss and of generation, or without effect
        *MambaFormat.READ, "attn_rotary_emb", "mamba_dt_rank", "num_logits_to_keep",
        "use_mamba_kernels", "z_loss_coefficient",
    )  # fmt: skip

    def _rotary_share(self, theirs: Fields) -> dict[str, Any]:
        """Nothing: transformers rotates half of a head's dims, whatever a file says."""
        return {}

    def pattern(self, theirs: Fields) -> str:
        """The letters of all layers, by a config.json with all defaults filled in."""
        attention = theirs["attn_layer_indices"] or ()
        return "".join("M*"[i in attention] for i in range(theirs["num_hidden_layers"]))

    def written_pattern(self, model: MambaConfig) -> dict[str, Any]:
        """The fields of a config.json that say which layers have attention."""
        letters = enumerate(model.letters)
        return {"attn_layer_indices": [i for i, letter in letters if letter == "*"]}


FORMATS = (BambaFormat(),)
BAMBA = ModelFamily(
    "bamba",
    BambaConfig,
    {
        "bamba_9b": decoder_sizes(32, 4096, 32, 8, 14336)
        | {"layer_pattern": "MMMMMMMMM*MMMMMMMM*MMMMMMMM*MMMM", "vocab_size": 128256}
        | {"max_seq_len": 4096, "rope_theta": 10000.0}
    },
    model="jaxpipe.model.recurrent.decoder:MambaDecoder",
    huggingface=__name__,
)
