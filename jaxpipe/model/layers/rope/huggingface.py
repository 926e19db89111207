"""Rotary positions in a config.json: `rope_theta`, and `rope_scaling` or `rope_parameters`.

transformers 4 writes `rope_theta` and `rope_scaling`, version 5 `rope_parameters` with both in it.
Absent fields have transformers' defaults.
"""

from collections.abc import Mapping
from typing import Any

from jaxpipe.model.layers.rope.config import SCALINGS, RotaryConfig
from jaxpipe.model.published import check_known

# jaxpipe's name: Hugging Face's name, in the order in which both write them.
_NAMES = {
    "rope_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_positions": "original_max_position_embeddings",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
    "rope_truncate": "truncate",
    "rope_short_factors": "short_factor",
    "rope_long_factors": "long_factor",
    "rope_attention_factor": "attention_factor",
    "rope_mscale": "mscale",
    "rope_mscale_all_dim": "mscale_all_dim",
}
FIELDS = (  # of a config.json, that this module reads
    "rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings",
)  # fmt: skip
_KNOWN = {
    *_NAMES.values(), "rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned",
}  # fmt: skip
# What an absent or null field means; other fields of a scaling have no default.
_DEFAULTS = {
    "rope_beta_fast": 32.0,
    "rope_beta_slow": 1.0,
    "rope_truncate": True,
    "rope_attention_factor": 0.0,
    "rope_mscale": 0.0,
    "rope_mscale_all_dim": 0.0,
}
_NOT_WRITTEN = ("rope_truncate", "rope_attention_factor", "rope_mscale", "rope_mscale_all_dim")


def rope_fields(theirs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of `rope_parameters` or `rope_scaling`; empty if there are none.

    Raises `ValueError`, with the end of a sentence that begins with the file, where both differ:
    transformers 5 would take the older name, and lose a `rope_theta` of the other.
    """
    now, before = theirs.get("rope_parameters") or {}, theirs.get("rope_scaling") or {}
    for fields in (now, before):
        if not isinstance(fields, Mapping):
            raise ValueError(f"scales rotary positions by {fields!r}, no table: take another file.")
    renamed = {"rope_type" if name == "type" else name: value for name, value in before.items()}
    if now and any(now.get(name) != value for name, value in renamed.items()):
        raise ValueError(
            f"has rope_parameters={now} and rope_scaling={before}, which differ: put all fields "
            f"into one of them, and remove the other."
        )
    return now or before


def of_layer_types(theirs: Mapping[str, Any], scaled: str, unscaled: str) -> dict[str, Any]:
    """A config.json with the fields of version 4 in place of `rope_parameters` by type of layer.

    Its `rope_scaling` and `rope_theta` are those of the type `scaled`, and `rope_local_base_freq`
    is the `rope_theta` of the type `unscaled`. Raises `ValueError`, with the end of a sentence that
    begins with the file, where that type is scaled, too.
    """
    ropes = theirs.get("rope_parameters") or {}
    without = {name: value for name, value in theirs.items() if name != "rope_parameters"}
    local, full = ropes.get(unscaled) or {}, ropes.get(scaled) or {}
    if local.get("rope_type", "default") != "default":
        raise ValueError(
            f"scales the rotary positions of {unscaled} (rope_type {local['rope_type']!r}) but "
            f"this model scales only those of {scaled}: take another checkpoint."
        )
    own = {"rope_scaling": full, **{k: v for k, v in full.items() if k == "rope_theta"}}
    if "rope_theta" in local:
        own["rope_local_base_freq"] = local["rope_theta"]
    return without | (own if ropes else {})


def expected(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary fields of `[model]` that a config.json implies.

    Raises `ValueError`, with the end of a sentence that begins with the file, where it scales
    positions in another way, or a field that has no default is missing.
    """
    rope = rope_fields(theirs)
    check_known(rope, _KNOWN, " in its rope_scaling or rope_parameters")
    theta = {"rope_theta": rope.get("rope_theta", theirs.get("rope_theta")) or 10000.0}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"rope_factor": 1.0} | theta
    if kind not in SCALINGS:
        raise ValueError(
            f"scales its rotary positions (rope_type {kind!r}) but this model knows only the ways "
            f"{', '.join(SCALINGS)}, and none: take another checkpoint."
        )
    longest = theirs.get("max_position_embeddings")
    defaults = _DEFAULTS | {"rope_original_positions": longest}
    original = theirs.get(_NAMES["rope_original_positions"])  # as Phi-3 has it
    if kind in ("llama3", "yarn", "longrope") and original:
        rope = {**rope, _NAMES["rope_original_positions"]: original}
    original = rope.get(_NAMES["rope_original_positions"])
    if kind in ("yarn", "longrope") and longest and original:
        defaults["rope_factor"] = longest / original
    values = {}
    for ours, name in _NAMES.items():
        if ours in ("rope_factor", *SCALINGS[kind]):
            value = rope.get(name)
            values[ours] = defaults.get(ours) if value is None else value
            if values[ours] is None:
                raise ValueError(
                    f"has no {name} in its rope_scaling of the type {kind!r}, which has no "
                    f"default: add it, or take the whole file."
                )
    values = {ours: tuple(v) if isinstance(v, list) else v for ours, v in values.items()}
    return {"rope_scaling": kind} | values | theta


def written(model: RotaryConfig, max_positions: int) -> dict[str, Any]:
    """The fields `rope_theta` and `rope_scaling` of a config.json, which both versions read.

    Raises `ValueError` with a sentence where `max_positions`, the longest context that the file
    names, would change scaled positions.
    """
    return {"rope_theta": model.rope_theta, "rope_scaling": _scaling(model, max_positions)}


def _scaling(model: RotaryConfig, max_positions: int) -> dict[str, Any] | None:
    kind = model.rope_scaling
    if model.rope_factor == model.rotary_scale == 1 and kind != "longrope":
        return None
    if kind == "dynamic" and max_positions != model.max_seq_len:
        raise ValueError(
            f"--max-positions {max_positions} but with model.rope_scaling='dynamic' positions are "
            f"scaled beyond model.max_seq_len={model.max_seq_len}: leave it out."
        )
    values = {
        name: getattr(model, ours)
        for ours, name in _NAMES.items()
        if ours in ("rope_factor", *SCALINGS[kind])
        and (ours not in _NOT_WRITTEN or getattr(model, ours) != _DEFAULTS[ours])
    }
    return {"rope_type": kind} | values
