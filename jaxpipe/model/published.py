"""How Hugging Face stores models: the interface of a family's module, and shared helpers."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class HuggingFaceTensor(NamedTuple):
    """Where Hugging Face stores one of our parameters.

    Attributes:
      name: the tensor's name after the prefix of its layer. With `{}` in it there is one tensor for
        every index of our first dim, which replaces `{}`; the other attributes then hold for each.
      transposed: whether the tensor's last two dims are ours exchanged.
      part: number of our parameter among those that share the tensor along our last dim, where
        each is as wide as ours is.
      groups: field of the model with the number of groups into which these parts are divided and in
        which they alternate, such as one per head; "": they follow one another undivided.
      ones: dims of the tensor, of size 1, that ours lacks, such as the second of `[X, 1, T]`, T
        taps of X channels. The other attributes hold without them.
      is_full_name: whether `name` is complete, without the prefix of its layer.
    """

    name: str
    transposed: bool = False
    part: int = 0
    groups: str = ""
    ones: tuple[int, ...] = ()
    is_full_name: bool = False

    def within(self, prefix: str) -> "HuggingFaceTensor":
        """The tensor with its full name, in a layer with this prefix."""
        return self if self.is_full_name else self._replace(name=prefix + self.name)


def fused(name: str, *paths: str) -> dict[str, HuggingFaceTensor]:
    """The transposed tensor of that name holds the parameters at these paths, in this order."""
    return {path: HuggingFaceTensor(name, transposed=True, part=i) for i, path in enumerate(paths)}


class HuggingFace(Protocol):
    """How Hugging Face stores an architecture: a module, or an object, with these names.

    Attributes:
      ARCHITECTURES: the names that config.json may give the model.
      MODELS: the models that the module covers, in words.
      BASE: prefix of tensor names. If no name has it, the checkpoint is of the model without its
        head, and all names lack it.
      PREFIX: prefix of the names of layer i, as `PREFIX.format(i)`.
      LAYER, ENDS: location of every parameter of a layer, and of embedding and head, by our path.
      FUSED: location of some parameters in checkpoints that lack the tensors of `LAYER` and `ENDS`.
      VARIABLES: location of the model's state that is no parameter, by its name: one tensor in
        each of its layers (`variable_layers`). A module of a family without any may leave it out.
      BUFFERS: endings of the names of tensors that hold no parameters.
      CHOICES: fields of `[model]` that have one value in all models of the architecture.
      HEAD, EMBED: names of one tensor if the model is `tied`, which some checkpoints store twice.
    """

    ARCHITECTURES: tuple[str, ...]
    MODELS: str
    BASE: str
    PREFIX: str
    LAYER: Mapping[str, HuggingFaceTensor]
    FUSED: Mapping[str, HuggingFaceTensor]
    ENDS: Mapping[str, HuggingFaceTensor]
    BUFFERS: tuple[str, ...]
    CHOICES: Mapping[str, Any]
    HEAD: str
    EMBED: str

    def describes(self, model: Any) -> bool:
        """Whether the architecture has all choices of a model of the family."""

    def tied(self, model: Any) -> bool:
        """Whether the head is the transposed embedding."""

    def ignores(self, name: str, model: Any) -> bool:
        """Whether to leave a tensor out that `model` has no place for.

        A module may lack it: then any such tensor is an error.
        """

    def with_defaults(self, theirs: Mapping[str, Any]) -> Mapping[str, Any]:
        """A config.json with transformers' defaults for absent fields, as far as they matter.

        Raises `ValueError` as `expected` does.
        """

    def expected(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of `[model]` that a config.json implies.

        Raises `ValueError`, with the end of a sentence that begins with the file, where it
        describes a model that the family does not support.
        """

    def trained(self, theirs: Mapping[str, Any], model: Any) -> dict[str, Any]:
        """The fields of `[model]` that only training reads, as a model's config.json has them.

        A run may have other values: an import reports these fields but does not compare them.
        """

    def written(self, model: Any, dtype: str, max_positions: int) -> dict[str, Any]:
        """The config.json of a model.

        Raises `ValueError` with a sentence where it cannot describe the model.
        """


# The class that transformers' AutoModelForCausalLM takes for a model_type of another name.
_BY_MODEL_TYPE = {
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "llama4": "Llama4ForConditionalGeneration",
    "llama4_text": "Llama4ForCausalLM",
}
# Endings of the names of tensors that are computed from config.json, in files of old versions.
BUFFERS = "inv_freq", "position_ids", ".cos_cached", ".sin_cached", "causal_mask", ".masked_bias"
# Fields of a config.json that change no number that a model computes from tokens.
HARMLESS = frozenset({
    # records, and how a program runs or trains the model
    "architectures", "model_type", "transformers_version", "name_or_path", "auto_map", "dtype",
    "torch_dtype", "use_bfloat16", "use_cache", "return_dict", "output_attentions",
    "output_hidden_states", "output_router_logits", "torchscript", "tf_legacy_loss",
    "chunk_size_feed_forward", "gradient_checkpointing", "pretraining_tp", "attn_implementation",
    "cache_implementation", "num_logits_to_keep", "tokenizer_class", "prefix", "is_decoder",
    "initializer_range", "model_max_length", "max_sequence_length", "unsloth_fixed",
    "unsloth_version", "transformers.js_config", "is_llama_config",
    # classification
    "id2label", "label2id", "num_labels", "problem_type", "finetuning_task",
    "task_specific_params",
    # generation
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
    "forced_bos_token_id", "forced_eos_token_id", "max_length", "min_length", "do_sample",
    "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k",
    "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores",
    "return_dict_in_generate", "remove_invalid_values", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens",
})  # fmt: skip
_FP8: dict[str, tuple[Any, ...]] = {
    "fmt": ("e4m3",),
    "weight_block_size": ([128, 128],),
    "activation_scheme": ("dynamic",),
}
# Fields of a multimodal file that rule over those of its text model.
_OF_ALL = (
    "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype",
)  # fmt: skip


def architecture(theirs: Mapping[str, Any], known: Sequence[str]) -> str:
    """The architecture of a config.json, which names it, or else its model_type.

    Raises `ValueError` if it is not in `known`.
    """
    names = theirs.get("architectures") or [_class_of(str(theirs.get("model_type")), known)]
    names = [names] if isinstance(names, str) else names
    if names[0] not in known:
        some, last = ", ".join(known[:-1]), known[-1]
        raise ValueError(
            f"names the architecture {names[0]} but only {f'{some} and {last}' if some else last} "
            f"can be imported: take a checkpoint of one of these."
        )
    return names[0]


def _class_of(model_type: str, known: Sequence[str]) -> str | None:
    """The class that transformers takes for a model_type: qwen3_moe is a Qwen3MoeForCausalLM."""
    classes = {name.removesuffix("ForCausalLM").replace("_", "").lower(): name for name in known}
    return _BY_MODEL_TYPE.get(model_type) or classes.get(model_type.replace("_", ""))


def of_text(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json in which the fields of a multimodal model's text model are not nested."""
    own = theirs.get("text_config") or {}
    if not isinstance(own, Mapping):
        raise ValueError(f"has text_config={own!r}, which is no table: take the whole file.")
    outer = {name: value for name, value in theirs.items() if name != "text_config"}
    ruling = {name: outer[name] for name in _OF_ALL if outer.get(name) is not None}
    return {**outer, **own, **ruling, "architectures": theirs.get("architectures")}


def sizes(theirs: Mapping[str, Any], ours: Mapping[str, str]) -> dict[str, Any]:
    """Sizes by our names, for fields that have no default.

    `ours` maps Hugging Face's names to ours. Raises `ValueError` where a field is missing or null,
    or no integer.
    """
    for name in ours:
        if theirs.get(name) is None:
            raise ValueError(
                f"has no {name}, which has no default: add it, or take the whole file."
            )
        if not isinstance(theirs[name], int):
            raise ValueError(f"has {name}={theirs[name]!r}, no integer: take the whole file.")
    return {own: theirs[name] for name, own in ours.items()}


def check_only(theirs: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise `ValueError` where a field has a value not in `allowed`; the first is the default."""
    for name, values in allowed.items():
        if theirs.get(name, values[0]) not in values:
            raise ValueError(
                f"has {name}={theirs[name]!r} but this model has only {name}={values[0]!r}: take "
                f"another checkpoint."
            )


def check_choices(model: Any, only: Mapping[str, Any], theirs: str) -> None:
    """Raise `ValueError` with a sentence where a model has other values than those in `only`."""
    for name, value in only.items():
        if getattr(model, name) != value:
            raise ValueError(
                f"model.{name.removeprefix('has_')}={getattr(model, name)!r}, but {theirs} have "
                f"only {value!r}: it cannot be exported."
            )


def check_known(theirs: Mapping[str, Any], known: Collection[str], place: str = "") -> None:
    """Raise `ValueError` where a field is neither known, harmless, nor empty.

    Args:
      theirs: a config.json, or a table in it.
      known: names of the fields that are read or checked.
      place: name of the table.
    """
    for name, value in theirs.items():
        if name == "is_causal" and value is not None:  # as every model here
            check_only(theirs, {name: (True,)})
            continue
        # transformers keeps its own notes in names with an underscore; dropout is of training.
        harmless = name in HARMLESS or name.startswith("_") or "dropout" in name
        if value and name not in known and not harmless:
            raise ValueError(
                f"has {name}={value!r}{place}, which is not known here and may change what the "
                f"model computes: remove it if it does not, or take another checkpoint."
            )


def check_quantised(theirs: Mapping[str, Any], method: str = "fp8") -> None:
    """Raise `ValueError` where weights are quantised in another way than those that are read.

    Those are 8-bit floats with a scale per block, for the method fp8, and MXFP4.
    """
    settings = theirs.get("quantization_config")
    if not settings:
        return
    found = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if found != method:
        raise ValueError(
            f"has quantization_config={settings!r} but of quantised weights only those of the "
            f"quant_method {method!r} can be read: take a checkpoint in bfloat16."
        )
    own = _FP8 if method == "fp8" else {}
    check_only(settings, own)
    known = {"quant_method", "modules_to_not_convert", "scale_fmt", "dequantize", *own}
    check_known(settings, known, " in its quantization_config")
