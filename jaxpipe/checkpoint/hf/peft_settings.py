"""The settings of PEFT's adapter_config.json: understood, harmless, or refused by name.

An adapter is alpha / rank * a b added to a weight that is the published one. A setting that changes
this product, the weight, or when the product counts would give other numbers without a word, so all
fields that are not known to be harmless must have the value of a plain adapter. Fields are those of
PEFT's `LoraConfig`, https://github.com/huggingface/peft.
"""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

Settings = Mapping[str, Any]

# Records, settings of training or of placement, and details of settings that are refused.
HARMLESS = frozenset({
    "auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision",
    "task_type", "lora_dropout", "fan_in_fan_out", "ensure_weight_tying", "runtime_config",
    "corda_config", "eva_config", "loftq_config", "lora_ga_config",
    "megatron_core", "qalora_group_size",
})  # fmt: skip
# Read by this module and by `read_adapters`.
UNDERSTOOD = frozenset({
    "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
    "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern",
})  # fmt: skip
# The values of plain adapters, besides null, false and empty ones.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", "all", "lora_only"),  # biases that the file holds are refused as tensors
    # Others change the base weights too, or train other parameters.
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}
MERGE = "merge the adapter into its base with PEFT's merge_and_unload, and import the result"
_TRAIN = "PEFT cannot save it merged either, so train plain adapters instead"
_CANNOT_MERGE = (
    "alora_invocation_tokens", "arrow_config", "layer_replication", "lora_bias", "megatron_config",
    "ADAPTION_PROMPT", "CARTRIDGE", "CPT", "LILY", "MULTITASK_PROMPT_TUNING", "POLY",
    "PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "SHADOW", "XLORA",
)  # fmt: skip


def refusal(settings: Settings) -> str:
    """A sentence about the first setting that is not understood; empty if all are.

    >>> refusal({"r": 8, "use_dora": True}).split(",")[0]
    'has use_dora=True'
    """
    for name, value in settings.items():
        taken = name in HARMLESS or name in UNDERSTOOD
        if taken or not value or _is_in(value, PLAIN.get(name, ())):
            continue
        return (
            f"has {name}={value!r}, which is no plain adapter (alpha / rank * a b on the published "
            f"weight): {_TRAIN if {name, str(value)} & {*_CANNOT_MERGE} else MERGE}."
        )
    for name, plain in {"rank_pattern": "r", "alpha_pattern": "lora_alpha"}.items():
        pattern = settings.get(name) or {}
        own = pattern.values() if isinstance(pattern, Mapping) else [pattern]
        if any(value != settings.get(plain) for value in own):
            return (
                f"has {name}={pattern!r}, but all adapters have the same lora.rank and lora.alpha "
                f"here: {MERGE}."
            )
    parameters = settings.get("target_parameters") or ()
    if not all(str(name).endswith(".weight") for name in parameters):
        return (
            f"has target_parameters={parameters!r}, but only adapters of single matrices are read: "
            f"{MERGE}."
        )
    return ""


def equivalent_alpha(settings: Settings) -> float:
    """The `lora.alpha` whose alpha / rank is the factor of PEFT's adapters.

    >>> equivalent_alpha({"r": 4, "lora_alpha": 8, "use_rslora": True})
    16.0
    """
    return settings["lora_alpha"] * (math.sqrt(settings["r"]) if settings.get("use_rslora") else 1)


def is_adapted(module: str, settings: Settings) -> bool:
    """Whether PEFT adapts the module of a name (`check_target_module_exists`).

    Raises `re.error` where a setting is no regular expression.

    >>> only = {"target_modules": ["q_proj"], "layers_to_transform": [1]}
    >>> [is_adapted(f"model.layers.{i}.self_attn.q_proj", only) for i in (0, 1)]
    [False, True]
    """
    if _matches(module, settings.get("exclude_modules") or ()):
        return False
    parameters = settings.get("target_parameters") or ()
    if _matches(f"{module}.weight", parameters):
        return True
    targets = settings.get("target_modules")
    if targets is None:
        return not parameters  # PEFT's own choice for the model
    if isinstance(targets, str):
        return targets == "all-linear" or _matches(module, targets)
    layers = settings.get("layers_to_transform")
    if layers is None or layers == []:
        return _matches(module, targets)
    patterns = settings.get("layers_pattern") or [r"[^.]*"]
    patterns = [patterns] if isinstance(patterns, str) else patterns
    # The first number is the layer's, a later one may be an expert's.
    found = (re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module) for pattern in patterns)
    index = next((int(match[1]) for match in found if match), None)
    wanted = layers if isinstance(layers, list) else [layers]
    return index in wanted and _matches(module, targets)


def _matches(module: str, targets: str | Collection[str]) -> bool:
    """Whether a name fits a regular expression, or is or ends with one of several names."""
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _is_in(value: Any, values: tuple[Any, ...]) -> bool:
    """Whether a value is one of these, where 1 is not True."""
    return any(value == one and type(value) is type(one) for one in values)
