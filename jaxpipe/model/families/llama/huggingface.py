"""Names and config.json of Llama 3 at Hugging Face, and what its relatives share with it.

Each relative is a class in `jaxpipe.model.families.llama.architectures` that changes what differs.
Fields are those of transformers' configurations, as version 4 writes them (`rope_theta`,
`rope_scaling`, `torch_dtype`) and as version 5 does (`rope_parameters`, `dtype`). An absent field
has transformers' default.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from jaxpipe.model import published
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.layers.rope import huggingface as rope
from jaxpipe.model.published import (
    HuggingFaceTensor,
    architecture,
    check_known,
    check_only,
    check_quantised,
    of_text,
    sizes,
)

FULL, LOCAL = "full_attention", "sliding_attention"  # entries of `layer_types`
Names = Mapping[str, HuggingFaceTensor]
Fields = Mapping[str, Any]
_PLAIN: Fields = {
    "qk_norm": False, "qkv_bias": False, "rotary_share": 1.0, "sliding_window": 0,
    "global_every": 0, "n_experts": 0,
}  # fmt: skip


def choices(*free: str, **fixed: Any) -> Fields:
    """The fields of `[model]` that one value describes in all models of an architecture.

    They are those of a Llama 3, with the values in `fixed`, but for those that are `free`.
    """
    return {name: value for name, value in {**_PLAIN, **fixed}.items() if name not in free}


_READ = (
    "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings",
    "max_position_embeddings", "layer_types", "quantization_config", "partial_rotary_factor",
    *rope.FIELDS,
)  # fmt: skip


class LlamaFormat:
    """How Hugging Face stores a Llama 3: a `HuggingFace`, and the base class of its relatives.

    Attributes:
      MODEL_TYPE: the name of the configuration's class.
      SIZES: sizes without defaults, by Hugging Face's names.
      FIELDS: what else both name differently, by Hugging Face's names; `DEFAULTS` has all of them.
      ROTARY_SHARE: default of `partial_rotary_factor`; None: the architecture has only 1.
      WINDOWS: None: the architecture has no windows; else `DEFAULTS` has `sliding_window`, and one
        layer in this many has no window if the file does not say which; 0: all layers have it.
      DEFAULTS: transformers' defaults of absent fields, where they differ from `_choices`.
      CHOICES: fields of `[model]` that have one value in all models of the architecture.
      ABSENT: features that the decoder lacks, and the values at which a checkpoint lacks them, too.
      WRITTEN: further fields of a config.json that have one value.
      READ: further fields that are read, or have no effect.
      QUANTISED: the way in which weights may be quantised.
    """

    ARCHITECTURES: ClassVar[tuple[str, ...]] = ("LlamaForCausalLM",)
    MODEL_TYPE: ClassVar[str] = "llama"
    MODELS: ClassVar[str] = "a plain Llama 3"
    BASE, PREFIX = "model.", "model.layers.{}."
    LAYER: ClassVar[Names] = {
        "attn_norm/scale": HuggingFaceTensor("input_layernorm.weight"),
        "attn/wq": HuggingFaceTensor("self_attn.q_proj.weight", transposed=True),
        "attn/wk": HuggingFaceTensor("self_attn.k_proj.weight", transposed=True),
        "attn/wv": HuggingFaceTensor("self_attn.v_proj.weight", transposed=True),
        "attn/wo": HuggingFaceTensor("self_attn.o_proj.weight", transposed=True),
        "mlp_norm/scale": HuggingFaceTensor("post_attention_layernorm.weight"),
        "mlp/w_gate": HuggingFaceTensor("mlp.gate_proj.weight", transposed=True),
        "mlp/w_up": HuggingFaceTensor("mlp.up_proj.weight", transposed=True),
        "mlp/w_down": HuggingFaceTensor("mlp.down_proj.weight", transposed=True),
    }
    FUSED: ClassVar[Names] = {}
    EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
    ENDS: ClassVar[Names] = {
        "embed": HuggingFaceTensor(EMBED),
        "final_norm/scale": HuggingFaceTensor("model.norm.weight"),
        "head": HuggingFaceTensor(HEAD, transposed=True),
    }
    BUFFERS: ClassVar[tuple[str, ...]] = published.BUFFERS
    IMAGES: ClassVar[tuple[str, ...]] = ("vision_model.", "vision_tower.", "multi_modal_projector.")
    SIZES: ClassVar[Mapping[str, str]] = {
        "num_hidden_layers": "n_layers",
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "intermediate_size": "d_ff",
        "vocab_size": "vocab_size",
    }
    FIELDS: ClassVar[Mapping[str, str]] = {}
    ROTARY_SHARE: ClassVar[float | None] = None
    WINDOWS: ClassVar[int | None] = None
    DEFAULTS: ClassVar[Fields] = {"bos_token_id": 1, "eos_token_id": 2}
    CHOICES: ClassVar[Fields] = choices()
    ABSENT: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "use_sliding_window": (False,),
    }
    WRITTEN: ClassVar[Fields] = {"hidden_act": "silu", "mlp_bias": False}
    READ: ClassVar[tuple[str, ...]] = ()
    QUANTISED: ClassVar[str] = "fp8"

    def describes(self, model: LlamaConfig) -> bool:
        """Whether the architecture has all choices of a model."""
        return all(getattr(model, name) == value for name, value in self.CHOICES.items())

    def tied(self, model: LlamaConfig) -> bool:
        """Whether the head is the transposed embedding."""
        return model.tied

    def ignores(self, name: str, model: LlamaConfig) -> bool:
        """Whether a tensor is of the images of a multimodal model."""
        return name.startswith(self.IMAGES)

    def with_defaults(self, theirs: Fields) -> Fields:
        """A config.json with transformers' defaults for absent fields.

        Raises `ValueError` where it names another architecture.
        """
        architecture(theirs, self.ARCHITECTURES)
        return {**self.DEFAULTS, **of_text(theirs)}

    def expected(self, theirs: Fields) -> dict[str, Any]:
        """The fields of `[model]` that a config.json implies.

        Raises `ValueError`, with the end of a sentence that begins with the file, where it
        describes a model that the family does not support.
        """
        theirs = self.with_defaults(theirs)
        check_quantised(theirs, self.QUANTISED)
        check_known(theirs, {*_READ, *self.SIZES, *self.DEFAULTS, *self.ABSENT, *self.READ})
        own = {ours: theirs[name] for name, ours in self.FIELDS.items()}
        own |= self._rotary_share(theirs) | self._windows(theirs) | self.own_expected(theirs)
        read = (*self.SIZES, *self.FIELDS)
        check_only(theirs, {name: only for name, only in self.ABSENT.items() if name not in read})
        found = {**sizes(theirs, self.SIZES), **_choices(theirs), **self.CHOICES, **own}
        self.check_types(theirs, found)
        return found

    def _rotary_share(self, theirs: Fields) -> dict[str, Any]:
        """The field `rotary_share`, where the architecture has it."""
        name = "partial_rotary_factor"
        share = rope.rope_fields(theirs).get(name, theirs.get(name))
        if self.ROTARY_SHARE is None:
            check_only({name: share}, {name: (1, None)})
            return {}
        return {"rotary_share": share or self.ROTARY_SHARE}

    def check_types(self, theirs: Fields, found: Fields) -> None:
        """Raise `ValueError` where a layer attends in another way than those of `found` do."""
        if found.get("global_every"):
            return
        attention = LOCAL if found["sliding_window"] else FULL
        for other in {*(theirs.get("layer_types") or ())} - {attention}:
            raise ValueError(
                f"has layers of {other} but all of this model's are of {attention}: take another "
                f"checkpoint."
            )

    def own_expected(self, theirs: Fields) -> dict[str, Any]:
        """The fields of `[model]` that only this architecture reads from a config.json."""
        return {}

    def _windows(self, theirs: Fields) -> dict[str, Any]:
        """The window, and how often a layer has none, where the architecture has windows.

        Raises `ValueError` where layers without a window are not at regular intervals.
        """
        if self.WINDOWS is None:
            return {}
        window, pattern = theirs["sliding_window"] or 0, theirs.get("sliding_window_pattern")
        if not self.WINDOWS or not window:
            return {"sliding_window": window, **({"global_every": 0} if self.WINDOWS else {})}
        every = pattern if isinstance(pattern, int) else self.WINDOWS
        types = theirs.get("layer_types")
        if not types and isinstance(pattern, str):  # LLLG, as EXAONE 4 has it
            types = [FULL if letter == "G" else LOCAL for letter in pattern]
        if types:
            every = types.index(FULL) + 1 if FULL in types else 0
            regular = [
                FULL if every and i % every == 0 else LOCAL for i in range(1, len(types) + 1)
            ]
            if types != regular:
                raise ValueError(
                    f"has layer_types that are not {LOCAL} with {FULL} in every n-th layer, as in "
                    f"this model: take another checkpoint."
                )
        return {"sliding_window": window, "global_every": every}

    def _written_windows(self, model: LlamaConfig) -> dict[str, Any]:
        """The window, and where layers without one exist the attention of every layer."""
        if self.WINDOWS is None:
            return {}
        found: dict[str, Any] = {"sliding_window": model.sliding_window or None}
        if self.WINDOWS:
            windows = (model.of_kind(kind).sliding_window for kind in model.layer_kinds)
            found["layer_types"] = [LOCAL if window else FULL for window in windows]
        return found

    def trained(self, theirs: Fields, model: LlamaConfig) -> dict[str, Any]:
        """The fields of `[model]` that only training reads, as a config.json has them."""
        return {}

    def written(self, model: LlamaConfig, dtype: str, max_positions: int) -> dict[str, Any]:
        """The config.json of a model, in the fields that both versions of transformers read.

        `max_positions` limits nothing in the model; inference servers take it for the longest
        context. Raises `ValueError` with a sentence where the architecture cannot express the
        model.
        """
        resolved, fields = model.resolved(), {**self.SIZES, **self.FIELDS}
        if self.ROTARY_SHARE is not None:
            fields["partial_rotary_factor"] = "rotary_share"
        return {
            "architectures": [self.ARCHITECTURES[0]],
            "model_type": self.MODEL_TYPE,
            "attention_bias": False,
            **{theirs: getattr(resolved, ours) for theirs, ours in fields.items()},
            "num_key_value_heads": model.n_kv_heads,
            "head_dim": model.head_size,
            "rms_norm_eps": model.norm_eps,
            **rope.written(model, max_positions),
            "max_position_embeddings": max_positions,
            "attention_dropout": 0.0,
            "tie_word_embeddings": model.tied,
            "bos_token_id": None,  # unknown; absent fields would mean the tokens of Llama 2
            "eos_token_id": None,
            "pad_token_id": None,
            "torch_dtype": dtype,
            **self.WRITTEN,
            **self._written_windows(model),
            **self.own_written(model),
        }

    def own_written(self, model: LlamaConfig) -> dict[str, Any]:
        """The fields of a config.json that only this architecture has."""
        return {}


def _choices(theirs: Fields) -> dict[str, Any]:
    """Fields with defaults in transformers, by our names."""
    heads = theirs["num_attention_heads"]
    return {
        "n_kv_heads": theirs.get("num_key_value_heads") or heads,
        "head_dim": theirs.get("head_dim") or theirs["hidden_size"] // heads,
        **rope.expected(theirs),
        "norm_eps": theirs.get("rms_norm_eps", 1e-6),
        "tie_embeddings": theirs.get("tie_word_embeddings", False),
    }
