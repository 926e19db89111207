"""Names and config.json of Nemotron-H at Hugging Face: those of transformers' `NemotronHConfig`."""

from typing import Any, ClassVar

from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.families.llama.huggingface import Fields, LlamaFormat, Names, choices
from jaxpipe.model.families.nemotron_h.config import KINDS, NemotronHConfig
from jaxpipe.model.layers.moe import huggingface as experts
from jaxpipe.model.published import HuggingFaceTensor, check_choices
from jaxpipe.model.recurrent.huggingface import mamba_names, without_positions

_BASE = "backbone."
# Entries of `layers_block_type`, now and before, by letter of `hybrid_override_pattern`.
_LETTERS = {
    "linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-",
    "moe": "E",
}  # fmt: skip
_TYPES = "layers_block_type", "layer_types"  # names of lists of these entries
_EXPERTS = {name: ours for name, ours in experts.FIELDS.items() if name not in (
    "n_shared_experts", "first_k_dense_replace"
)}  # fmt: skip
_ROUTER: Fields = {"router_score": "sigmoid", "router_bias": True, "group_score_experts": 2}


def _matrix(name: str) -> HuggingFaceTensor:
    return HuggingFaceTensor(f"mixer.{name}.weight", transposed=True)


class NemotronHFormat(LlamaFormat):
    """`NemotronHForCausalLM`."""

    ARCHITECTURES: ClassVar[tuple[str, ...]] = ("NemotronHForCausalLM",)
    MODEL_TYPE: ClassVar[str] = "nemotron_h"
    MODELS: ClassVar[str] = "a Nemotron-H"
    BASE, PREFIX = _BASE, f"{_BASE}layers.{{}}."
    EMBED = f"{_BASE}embeddings.weight"
    ENDS: ClassVar[Names] = {
        **LlamaFormat.ENDS,
        "embed": HuggingFaceTensor(EMBED),
        "final_norm/scale": HuggingFaceTensor(f"{_BASE}norm_f.weight"),
    }
    LAYER: ClassVar[Names] = {
        "norm/scale": HuggingFaceTensor("norm.weight"),
        **mamba_names("mixer."),
        **{f"attn/w{one}": _matrix(f"{one}_proj") for one in "qkvo"},
        **{f"mlp/w_{one}": _matrix(f"{one}_proj") for one in ("up", "down")},
        "moe/router/gate": _matrix("gate"),
        **{f"moe/experts/w_{one}": _matrix(f"experts.{{}}.{one}_proj") for one in ("up", "down")},
        **{f"moe/shared/w_{one}": _matrix(f"shared_experts.{one}_proj") for one in ("up", "down")},
    }
    VARIABLES: ClassVar[Names] = {
        "router_bias": HuggingFaceTensor("mixer.gate.e_score_correction_bias")
    }
    FIELDS: ClassVar[Fields] = {
        "mamba_num_heads": "mamba_heads",
        "mamba_head_dim": "mamba_head_dim",
        "n_groups": "mamba_groups",
        "ssm_state_size": "mamba_state",
        "conv_kernel": "mamba_taps",
        "time_step_min": "mamba_step_min",
        "layer_norm_epsilon": "norm_eps",
    }
    DEFAULTS: ClassVar[Fields] = {
        "num_key_value_heads": 8, "head_dim": 128, "layer_norm_epsilon": 1e-5,
        "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128,
        "conv_kernel": 4, "time_step_min": 0.001, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
        "routed_scaling_factor": 1.0, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
        "hybrid_override_pattern": "ME*-",
    }  # fmt: skip
    CHOICES: ClassVar[Fields] = choices("n_experts", tie_embeddings=False)
    ABSENT: ClassVar[Fields] = {
        "mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu",), "attention_bias": (False,),
        "mlp_bias": (False,), "use_bias": (False,), "mamba_proj_bias": (False,),
        "use_conv_bias": (True,), "sliding_window": (None,), "moe_latent_size": (None,),
        "residual_in_fp32": (False,), "tie_word_embeddings": (False,),
    }  # fmt: skip
    READ: ClassVar[tuple[str, ...]] = (  # of initial values, kernels and caches, or without effect
        "expand", "chunk_size", "time_step_max", "time_step_floor",
        "time_step_limit", "time_step_rank", "rescale_prenorm_residual", "n_shared_experts",
        "use_mamba_kernels", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "norm_eps",
        "num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern",
    )  # fmt: skip
    WRITTEN: ClassVar[Fields] = {
        "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "mlp_bias": False,
        "use_bias": False, "use_conv_bias": True,
    }  # fmt: skip

    def ignores(self, name: str, model: LlamaConfig) -> bool:
        """Whether a tensor is of the layers that predict further tokens."""
        return name.startswith("mtp.") or super().ignores(name, model)

    def with_defaults(self, theirs: Fields) -> Fields:
        """A config.json with transformers' defaults, and all layers' letters.

        Raises `ValueError` where it names a kind of layers that the model does not have.
        """
        found = dict(super().with_defaults(theirs))
        types = next(filter(None, [found.pop(name, None) for name in _TYPES]), None)
        if types:
            found["hybrid_override_pattern"] = "".join(_LETTERS.get(one, "?") for one in types)
        pattern = found["hybrid_override_pattern"]
        if not isinstance(pattern, str) or not set(pattern) <= set(KINDS) or not pattern:
            raise ValueError(
                f"has layers {types or pattern!r}, but layers of this model are of "
                f"{', '.join(KINDS.values())}: take another checkpoint."
            )
        return found | {"num_hidden_layers": len(pattern)}

    def expected(self, theirs: Fields) -> dict[str, Any]:
        """The fields of `[model]` that a config.json implies; its positions have no effect."""
        return without_positions(super().expected(theirs))

    def own_expected(self, theirs: Fields) -> dict[str, Any]:
        """The kinds of layers, and the experts, if layers have them."""
        pattern = theirs["hybrid_override_pattern"]
        if "E" not in pattern:
            return {"layer_pattern": pattern, "n_experts": 0}
        width = "moe_shared_expert_intermediate_size"
        shared = experts.shared_count(theirs, width, "moe_intermediate_size")
        own = {ours: theirs[name] for name, ours in _EXPERTS.items()}
        return {"layer_pattern": pattern, "shared_experts": shared, **_ROUTER, **own}

    def written(self, model: LlamaConfig, dtype: str, max_positions: int) -> dict[str, Any]:
        """The config.json of a model, without positions and the name of other models' epsilon."""
        found = without_positions(super().written(model, dtype, max_positions))
        return {name: value for name, value in found.items() if name != "rms_norm_eps"}

    def own_written(self, model: NemotronHConfig) -> dict[str, Any]:
        """The kind of every layer, and the experts, if layers have them."""
        resolved = model.resolved()
        found = {
            "hybrid_override_pattern": resolved.layer_pattern, "chunk_size": model.mamba_chunk
        }  # fmt: skip
        if not model.n_experts:
            return found
        check_choices(model, _ROUTER, f"the experts of {self.MODELS}")
        if not model.shared_experts:
            raise ValueError(
                f"model.shared_experts=0, but the experts of {self.MODELS} have at least one that "
                f"is shared: it cannot be exported."
            )
        return found | {
            **{name: getattr(resolved, ours) for name, ours in _EXPERTS.items()},
            "moe_shared_expert_intermediate_size": model.shared_experts * model.expert_width,
        }


FORMATS = (NemotronHFormat(),)
