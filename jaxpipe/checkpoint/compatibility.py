"""Checks that a checkpoint belongs to the configured model, by its settings and its arrays.

Every field of `[model]` is compared except the ones listed below, so a new field is compared unless
it is added to a list.
"""

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgspec

from jaxpipe.checkpoint.exclusion import leaves_by_name
from jaxpipe.config import Config, ConfigError, LoraConfig, first_line
from jaxpipe.model import ModelConfig
from jaxpipe.model.layers.lora import NAME as LORA

Tree = Any
# Raises `ConfigError` for a path and metadata of another run or model. Returns the sizes in which
# the checkpoint differs, by setting, with its values: its arrays are then of other shapes.
Check = Callable[[Any, dict[str, Any]], Mapping[str, Any]]
_UNKNOWN = "unknown to this version"

# Fields of [model] that may differ from the checkpoint's, and why.
MAY_DIFFER = {
    "preset": "a name for values of other fields",
    "attention": "another implementation of the same function",
    "max_seq_len": "a limit; learned positions are arrays; but longrope chooses factors by it",
    "dropout": "in training only",
    "attention_dropout": "in training only",
    "router_aux_loss": "in training only",
    "router_z_loss": "in training only",
    "router_bias_step": "in training only",
    "router_bias_rate": "in training only, but a bias that was trained may not be left out",
    "router_bias": "as router_bias_rate",
    "mtp_weight": "in training only",
    "capacity_factor": "a limit of memory and time, which a run may raise or lower",
}
# Fields that the array shapes show; the shapes of the arrays that are read are compared instead.
SHOWN_BY_ARRAYS = frozenset(
    {"n_layers", "d_model", "vocab_size", "d_ff", "qk_norm", "qkv_bias", "tie_embeddings"}
    | {"mtp_depth", "n_experts", "d_expert", "shared_experts", "first_dense_layers", "moe_every"}
)


def check_same_settings(
    checkpoint: Path, meta: Mapping[str, Any], config: Config, *, with_moments: bool
) -> dict[str, Any]:
    """Return the sizes in which a checkpoint differs from `config`, by setting, with its values.

    Raises `ConfigError` where it was trained with other settings that no array shows. Compares
    `[model]` without the fields that may differ and those in `checkpoint.allow_changed`,
    `lora.alpha` of adapters, and `optimizer.name` if moments are read (`with_moments`). A
    checkpoint of another program, without a configuration, is not compared.
    """
    if "config" not in meta:
        return {}
    try:
        saved = tomllib.loads(meta["config"])
        changed = changed_settings(saved["model"], config.model)
    except (tomllib.TOMLDecodeError, KeyError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"checkpoint {checkpoint} holds a configuration that this version does not read "
            f"({first_line(error)}): use the version of jaxpipe that wrote it."
        ) from error
    allowed = set(config.checkpoint.allow_changed)
    changed = {key: values for key, values in changed.items() if key not in allowed}
    if changed:
        changed, may_be_allowed = _given_settings(changed, saved["model"], config.model)
        there, here = (
            ", ".join(f"{key}={_format_value(values[i])}" for key, values in changed.items())
            for i in (0, 1)
        )
        remedies = [f"set {there.replace(', ', ' ')}"]
        if str(checkpoint).startswith(f"{config.run.dir}/"):
            remedies.append("use another run.dir")
        if may_be_allowed:
            allow = f"'checkpoint.allow_changed={json.dumps(list(changed))}'"
            remedies.append(f"if the change is meant {allow}")
        raise ConfigError(
            f"checkpoint {checkpoint} was trained with {there} but this configuration has {here}: "
            f"{', or '.join(remedies)}."
        )
    adapters = saved.get("lora", {})
    if adapters.get("rank") and config.lora.rank:
        alpha = adapters.get("alpha", LoraConfig().alpha)
        if alpha != config.lora.alpha:
            raise ConfigError(
                f"checkpoint {checkpoint} has adapters that were trained with lora.alpha={alpha} "
                f"but this configuration has {config.lora.alpha}, by which they are scaled: set "
                f"lora.alpha={alpha}."
            )
    _check_optimizer(checkpoint, saved.get("optimizer", {}), meta, config, with_moments)
    changed = _changed_sizes(saved["model"], config.model)
    sizes = {name: there for name, (there, _) in changed.items()}
    if (rank := adapters.get("rank", 0)) != config.lora.rank:
        sizes["lora.rank"] = rank
    return sizes


def _check_optimizer(
    checkpoint: Path,
    saved: Mapping[str, Any],
    meta: Mapping[str, Any],
    config: Config,
    with_moments: bool,
) -> None:
    """Raise `ConfigError` where a run's optimizer cannot go on from that of a checkpoint.

    `saved` is the section `[optimizer]` of the configuration in the checkpoint's metadata `meta`.
    """
    before, now = saved.get("name"), config.optimizer.name
    has_average = meta.get("has_average", before == "schedule_free")
    if has_average and not with_moments and meta.get("kind") != "params":
        raise ConfigError(
            f"checkpoint {checkpoint} is of optimizer.name={before!r}, whose parameters are "
            f"not the average that it evaluates and exports: export it and import that, or resume "
            f"it as a whole."
        )
    if with_moments and before == now == "schedule_free":
        there, here = saved.get("beta1"), config.optimizer.beta1
        if there != here:
            raise ConfigError(
                f"checkpoint {checkpoint} was trained with optimizer.beta1={there} but this "
                f"configuration has {here}, which would change the average that 'schedule_free' "
                f"evaluates: set optimizer.beta1={there}."
            )
    if with_moments and before not in (None, now):
        raise ConfigError(
            f"checkpoint {checkpoint} was trained with optimizer.name={before!r} but this "
            f"configuration has optimizer.name={now!r}, which has other moments: set "
            f"optimizer.name={before}, or take its parameters alone, in another run.dir, with "
            f"checkpoint.resume={checkpoint} checkpoint.parameters_only=true."
        )


def changed_settings(saved: Mapping[str, Any], model: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Fields in which a saved `[model]` differs from `model`, as `{"model.x": (old, new)}`.

    Derived sizes are resolved first: `head_dim=0` becomes d_model / n_heads.
    """
    family = saved.get("family", ModelConfig.DEFAULT)
    if family != model.family:
        return {"model.family": (family, model.family)}
    fields = type(model).__struct_fields__
    known = {name: value for name, value in saved.items() if name in fields}
    before = msgspec.convert(known, type(model)).resolved()
    now = model.resolved()
    changed = {
        name: (getattr(before, name), getattr(now, name))
        for name in fields
        if name not in MAY_DIFFER and name not in SHOWN_BY_ARRAYS
    }
    changed |= {name: (saved[name], _UNKNOWN) for name in saved.keys() - known.keys()}
    rate = "router_bias_rate"
    if getattr(now, "rope_scaling", None) == "longrope":
        then_factors, factors = (getattr(of, "longrope_factors", None) for of in (before, now))
        if then_factors != factors:
            changed["max_seq_len"] = before.max_seq_len, now.max_seq_len
    if getattr(before, "has_router_bias", False) and not getattr(now, "has_router_bias", False):
        changed[rate] = (getattr(before, rate), getattr(now, rate))
    return {f"model.{name}": pair for name, pair in changed.items() if pair[0] != pair[1]}


def _given_settings(
    changed: dict[str, tuple[Any, Any]], saved: Mapping[str, Any], model: ModelConfig
) -> tuple[dict[str, tuple[Any, Any]], bool]:
    """`changed` with the settings that were given in place of sizes that derive from them.

    Also returns whether `checkpoint.allow_changed` can allow the changes: not those of sizes.
    """
    given = {name: getattr(model, name) for name in type(model).__struct_fields__}
    derived = {
        key for key in changed
        if (name := key.removeprefix("model.")) in given and saved.get(name) == given[name]
    }  # fmt: skip
    if not derived:
        return changed, True
    sizes = _changed_sizes(saved, model)
    others = {key: values for key, values in changed.items() if key not in derived}
    return sizes | others or changed, not sizes


def _changed_sizes(saved: Mapping[str, Any], model: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """The given sizes in which a saved `[model]` differs from `model`, as `changed_settings`."""
    given = {name: getattr(model, name) for name in type(model).__struct_fields__}
    return {
        f"model.{name}": (saved[name], given[name])
        for name in sorted(SHOWN_BY_ARRAYS & given.keys() & saved.keys())
        if saved[name] != given[name]
    }


def drop_absent_variables(stored: Tree, like: Tree) -> Tree:
    """`like` with only those variables that the checkpoint stores with the same shapes."""
    if not isinstance(like.get("variables"), dict):
        return like

    def shapes(tree: Tree) -> dict[str, tuple[int, ...]]:
        return {name: tuple(leaf.shape) for name, leaf in leaves_by_name(tree).items()}

    saved = stored.get("variables") or {}
    variables = {
        name: leaf for name, leaf in like["variables"].items()
        if name in saved and shapes({name: leaf}) == shapes({name: saved[name]})
    }  # fmt: skip
    others = {name: part for name, part in like.items() if name != "variables"}
    return others | ({"variables": variables} if variables else {})


def check_same_arrays(
    expected: Tree,
    stored: Tree,
    where: Path,
    *,
    left_out: frozenset[str] = frozenset(),
    sizes: Mapping[str, Any],
) -> None:
    """Raise `ConfigError` for the first array whose stored shape or dtype kind differs.

    Args:
        expected: shapes of this configuration in keyed form.
        stored: shapes of the checkpoint in keyed form.
        where: the checkpoint.
        left_out: names of arrays that are not compared.
        sizes: settings in which they may differ, with the checkpoint's values (`Check`).
    """
    wanted, present = (
        {name: leaf for name, leaf in leaves_by_name(tree).items() if name not in left_out}
        for tree in (expected, stored)
    )
    want = {name: tuple(leaf.shape) for name, leaf in wanted.items()}
    have = {name: tuple(leaf.shape) for name, leaf in present.items()}
    have = {
        name: shape for name, shape in have.items()
        if name in want or name.split("/")[0] in expected.keys() - {"variables"}
    }  # fmt: skip
    for name in sorted({*want, *have}, key=lambda name: (not name.startswith("params"), name)):
        is_param = name.startswith("params")
        what, section = ("model", "[model]") if is_param else ("optimizer", "[optimizer]")
        if is_adapter := LORA in name.split("/"):
            section = "[lora]"
        if want.get(name) != have.get(name):
            words = [
                f"{key}={_format_value(value)}" for key, value in sizes.items()
                if is_adapter or not key.startswith("lora.")
            ]  # fmt: skip
            remedy = f"set {' '.join(words)}," if words else f"change {section} back"
            raise ConfigError(
                f"checkpoint {where} is of another {what}: {name} has shape "
                f"{have.get(name, 'none (absent)')} there and {want.get(name, 'none (absent)')} in "
                f"this configuration; {remedy} or use another run.dir."
            )
        kinds = [jnp.issubdtype(leaf[name].dtype, jnp.inexact) for leaf in (wanted, present)]
        if kinds[0] != kinds[1]:
            raise ConfigError(
                f"checkpoint {where} is of another {what}: {name} has dtype {present[name].dtype} "
                f"there and {wanted[name].dtype} in this configuration; use another run.dir."
            )


def _format_value(value: Any) -> str:
    return value if value == _UNKNOWN else json.dumps(value)
