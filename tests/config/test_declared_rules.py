"""Rules declared beside their settings: every one is refused, and the error names both settings."""

import re
from pathlib import Path
from typing import Annotated, get_type_hints

import msgspec
import pytest

from jaxpipe.config import Config, ConfigError, load, rules
from jaxpipe.config.rules import (
    CUSTOM,
    at_most,
    check_rules,
    declared_rules,
    divides,
    excludes,
    multiple_of,
    needs,
    read_with,
    unread_with,
    without_unread,
)

BASE = Path(__file__).parents[1] / "data" / "base.toml"
MTP = BASE.parents[2] / "configs" / "quickstart_deepseek.toml"  # its family has model.mtp_depth

# Overrides of a small run, the first of which is of the guarded setting, and the other setting.
BROKEN = (
    "train.spike_window=64 -> train.spike_sigma",
    "train.spike_limit=4 -> train.spike_sigma",
    "train.spike_rollbacks=1 -> train.spike_sigma",
    "train.on_corruption=warn -> train.corruption_check_every",
    "train.evaluate_limit=5 -> train.evaluate_every",
    "train.evaluate_include_path=tasks -> train.evaluate_every",
    "train.evaluate_tokenizer=bytes -> train.evaluate_every",
    "preference.beta=0.2 -> train.loss",
    "preference.label_smoothing=0.1 -> train.loss",
    "lora.targets=['wq'] -> lora.rank",
    "lora.dropout=0.1 -> lora.rank",
    "lora.adapter=folder -> lora.rank",
    "optimizer.muon_lr=0.1 -> optimizer.name",
    "log.profile_steps=5 -> log.profile_start",
    "runtime.programs=folder train.variable_length=true -> train.variable_length",
    "debug.ticks=[0,3] -> debug.print_messages",
    "debug.pp_ranks=[0] -> debug.print_messages",
    "optimizer.name=schedule_free -> optimizer.decay",
    "optimizer.name=schedule_free optimizer.decay=constant optimizer.beta1=0 -> optimizer.beta1",
    "optimizer.beta1=0.8 optimizer.name=adafactor -> optimizer.name",
    "optimizer.beta2=0.9 optimizer.name=sgd -> optimizer.name",
    "optimizer.eps=0.1 optimizer.name=lion -> optimizer.name",
    "optimizer.muon_momentum=0.9 -> optimizer.name",
    "optimizer.decay_of_embed_head=0.5 optimizer.weight_decay=0 -> optimizer.weight_decay",
    "optimizer.decay_of_vectors=0.5 optimizer.weight_decay=0 -> optimizer.weight_decay",
    "optimizer.min_lr_ratio=0 optimizer.decay=constant -> optimizer.decay",
    "optimizer.wsd_decay_fraction=0.1 -> optimizer.decay",
    "checkpoint.every=3 train.fused_steps=2 -> train.fused_steps",
    "checkpoint.keep_every=4 -> checkpoint.every",
    "checkpoint.local_every=2 -> checkpoint.local_dir",
    "checkpoint.local_every=3 checkpoint.local_dir=a train.fused_steps=2 -> train.fused_steps",
    "checkpoint.local_dir=folder -> checkpoint.local_every",
    "checkpoint.parameters_only=true -> checkpoint.resume",
    "checkpoint.exclude=['embed_head/head'] checkpoint.resume=none -> checkpoint.resume",
    "checkpoint.allow_changed=['model.d_ff'] checkpoint.resume=none -> checkpoint.resume",
    "log.wandb_project=mine -> log.wandb",
    "log.profile_start=11 -> train.steps",
    "log.profile_start=3 log.bubble_every=5 -> log.bubble_every",
    "log.bubble_every=5 parallel.pp=1 -> parallel.pp",
    "runtime.min_devices=3 -> parallel.pp",
    "runtime.min_devices=1 parallel.dp=-1 -> parallel.dp",
    "debug.print_messages=true parallel.pp=1 -> parallel.pp",
    "data.source=dummy data.sources=[{path='a'}] -> data.sources",
    "data.path=a data.sources=[{path='a'}] -> data.sources",
    "data.path=a -> data.source",
    "data.heldout_fraction=0.1 data.source=file data.heldout_path=a -> data.heldout_path",
    "data.packing=best_fit data.shuffle=false -> data.shuffle",
    "data.max_documents=8 -> data.packing",
    "data.balance_rows=8 -> data.packing",
    "train.fused_steps=2 train.variable_length=true -> train.variable_length",
    "train.fused_steps=2 train.offload_moments=true -> train.offload_moments",
    "train.remat=ahead train.offload_layers=1 -> train.offload_layers",
    "train.remat=ahead parallel.slices=2 -> parallel.slices",
    "train.remat_layers=1 train.remat=full -> train.remat",
    "train.remat_layers=1 train.offload_layers=1 -> train.offload_layers",
    "train.fused_steps=2 train.corruption_check_every=2 -> train.corruption_check_every",
    "train.seq_len=32 model.max_seq_len=31 -> model.max_seq_len",
    "train.length_bucket=64 -> train.variable_length",
    "train.pad_to_multiple_of=64 -> train.variable_length",
    "train.fp8=current -> train.compute_dtype",
    "train.fp8_history=16 train.fp8=current train.compute_dtype=bfloat16 -> train.fp8",
    "train.corruption_check_every=2 -> train.deterministic",
    "train.corruption_check_every=2 train.deterministic=true train.variable_length=true "
    "-> train.variable_length",
    "train.loss_chunks=2 parallel.defer_embed_head=true -> parallel.defer_embed_head",
    "train.loss=dpo parallel.dp=2 parallel.cp=2 -> parallel.cp",
    "train.loss=dpo parallel.slices=2 -> parallel.slices",
    "train.loss=dpo train.z_loss=0.1 -> train.z_loss",
    "train.loss=dpo model.mtp_depth=1 -> model.mtp_depth",
    "train.loss=dpo data.packing=sequential -> data.packing",
    "train.loss_rows=['reward'] -> train.loss",
    "train.loss_temperature=2.0 train.loss=dpo -> train.loss",
    "train.eval_every=3 train.fused_steps=2 -> train.fused_steps",
    "train.eval_steps=2 -> train.eval_every",
    "train.evaluate_every=2 -> train.evaluate_tasks",
    "train.evaluate_every=3 train.evaluate_tasks=['arc'] train.fused_steps=2 -> train.fused_steps",
    "train.evaluate_every=2 train.evaluate_tasks=['arc'] model.mtp_depth=1 -> model.mtp_depth",
    "train.evaluate_tasks=['arc'] -> train.evaluate_every",
    "lora.rank=65 -> model.d_model",
    "lora.rank=2 model.router_bias_rate=0.1 -> model.router_bias_rate",
    "lora.alpha=8.0 -> lora.rank",
    "parallel.dp=3 parallel.dp_replicate=2 -> parallel.dp_replicate",
    "parallel.dp=3 parallel.cp=2 -> parallel.cp",
    "parallel.dp_replicate=2 parallel.dp=2 parallel.zero_stage=0 -> parallel.zero_stage",
    "parallel.cp_heads=2 parallel.dp=2 parallel.cp=2 -> parallel.cp_method",
    "parallel.cp_heads=3 parallel.dp=2 parallel.cp=2 parallel.cp_method=ring -> parallel.cp",
    "parallel.ep=2 parallel.dp=2 -> model.n_experts",
    "parallel.ep=2 parallel.dp=2 model.n_experts=3 -> model.n_experts",
    "parallel.ep_over_tp=true -> parallel.ep",
    "parallel.ep_per_host=3 parallel.ep=4 parallel.dp=4 model.n_experts=4 -> parallel.ep",
    "parallel.ep_per_host=2 parallel.ep=4 parallel.dp=4 model.n_experts=4 "
    "model.capacity_factor=2.0 -> model.capacity_factor",
    "parallel.ep_over_tp=true parallel.ep=2 model.n_experts=4 parallel.tp=2 "
    "-> parallel.sequence_parallel",
    "parallel.ep_buffer_factor=2.0 -> parallel.ep",
    "parallel.ep_buffer_factor=2.0 parallel.ep=2 parallel.dp=2 model.n_experts=4 "
    "model.capacity_factor=2.0 -> model.capacity_factor",
    "parallel.sequence_parallel=true -> parallel.tp",
    "parallel.vocab_parallel_pp=true parallel.pp=1 -> parallel.pp",
    "parallel.vocab_parallel_pp=true parallel.defer_embed_head=true -> parallel.defer_embed_head",
    "parallel.reshard_after_forward=true -> parallel.zero_stage",
    "parallel.input_weight=0 parallel.layer_split=[2,2] -> parallel.layer_split",
    "parallel.input_weight=0 parallel.layer_split=weighted parallel.first_stage_layers=1 "
    "-> parallel.first_stage_layers",
    "parallel.input_weight=0 parallel.layer_split=weighted parallel.last_stage_layers=1 "
    "-> parallel.last_stage_layers",
    "parallel.output_weight=2 -> parallel.layer_split",
    "parallel.output_weight=2 parallel.layer_split=weighted parallel.first_stage_layers=1 "
    "-> parallel.first_stage_layers",
    "parallel.output_weight=2 parallel.layer_split=weighted parallel.last_stage_layers=1 "
    "-> parallel.last_stage_layers",
    "parallel.first_stage_layers=1 parallel.layer_split=balanced -> parallel.layer_split",
    "parallel.last_stage_layers=1 parallel.layer_split=balanced -> parallel.layer_split",
)


def parsed(case):
    """Return the overrides of a case, its guarded setting and the other setting."""
    overrides, _, other = case.partition(" -> ")
    return overrides.split(), overrides.partition("=")[0], other


@pytest.mark.parametrize("case", BROKEN)
def test_every_declared_rule_is_refused(case):
    overrides, setting, other = parsed(case)
    with pytest.raises(ConfigError) as caught:
        check_rules(load(MTP if "model.mtp_depth=1" in overrides else BASE, overrides))
    assert str(caught.value).startswith(f"{setting}=")
    assert other in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_declared_rule_is_without_a_case():
    declared = {
        (f"{section}.{key}", name)
        for section, record in get_type_hints(Config).items()
        if section != "model"
        for key, sentences in declared_rules(section, record).items()
        for sentence in sentences
        for name in re.findall(r"`(\w+\.\w+)[`=]", sentence)[1:]
    }
    cases = {parsed(case)[1:] for case in BROKEN}
    assert cases <= declared
    of_a_product = {("runtime.min_devices", "parallel.tp")}  # its first factor has a case
    assert declared - cases == of_a_product


@pytest.mark.parametrize(
    ("overrides", "package"),
    [
        (["log.wandb=offline"], "wandb, which is not installed: pip install wandb, or"),
        (["log.prometheus_port=9100"], "prometheus_client, which is not installed: pip install p"),
        (
            ["train.evaluate_every=2", "train.evaluate_tasks=['arc_easy']"],
            "lm_eval, which is not installed: pip install -e '.[eval]', or leave train.ev",
        ),
    ],
)
def test_a_missing_package_is_named(monkeypatch, overrides, package):
    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        check_rules(load(BASE, overrides))
    assert f" needs the package {package}" in str(caught.value)


class Engine(msgspec.Struct, frozen=True):
    """A section with a rule of every form."""

    kind: str = "plain"
    turbo: Annotated[bool, needs("engine.kind", "v8", "v12")] = False
    boost: Annotated[float, read_with("engine.turbo")] = 1.0
    fuel: Annotated[str, excludes("engine.kind", "electric", when="diesel", why="it has none")] = ""
    choke: Annotated[int, unread_with("engine.fuel", "petrol")] = 0
    tune: Annotated[str, needs("engine.kind", CUSTOM)] = ""
    gears: Annotated[int, needs("engine.valves", above=1)] = 0
    valves: Annotated[int, multiple_of("engine.cylinders", "engine.banks")] = 0
    cylinders: int = 1
    banks: Annotated[int, divides("engine.cylinders")] = 1
    idle: Annotated[int, at_most("engine.cylinders", why="one at a time")] = 0


class Car(msgspec.Struct, frozen=True):
    """A configuration of one section."""

    engine: Engine = Engine()


def refusal(**fields):
    """Return the error of a configuration; "" if it keeps all rules."""
    try:
        check_rules(Car(Engine(**fields)))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"turbo": True},
            "engine.turbo=true needs engine.kind='v8' or engine.kind='v12', but engine.kind is "
            "'plain': set engine.kind='v8', or leave engine.turbo at its default, "
            "false.",
        ),
        (
            {"boost": 2.0},
            "engine.boost=2.0 is read only with engine.turbo, but engine.turbo is false: set "
            "engine.turbo, or leave engine.boost at its default, 1.0.",
        ),
        (
            {"fuel": "diesel", "kind": "electric"},
            "engine.fuel='diesel' excludes engine.kind='electric': it has none; leave engine.fuel "
            "at its default, '', or change engine.kind.",
        ),
        (
            {"choke": 1, "fuel": "petrol"},
            "engine.choke=1 is not read with engine.fuel='petrol': leave engine.choke at its "
            "default, 0, or change engine.fuel.",
        ),
        (
            {"gears": 5},
            "engine.gears=5 needs engine.valves above 1, but engine.valves is 0: raise "
            "engine.valves, or leave engine.gears at its default, 0.",
        ),
        (
            {"valves": 6, "cylinders": 4, "banks": 2},
            "engine.valves=6 must be a multiple of engine.cylinders=4 x engine.banks=2: change one "
            "of them.",
        ),
        (
            {"cylinders": 3, "banks": 2},
            "engine.banks=2 must divide engine.cylinders=3: change one of them.",
        ),
        (
            {"idle": 2},
            "engine.idle=2 must be at most engine.cylinders=1: one at a time; change one of them.",
        ),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else "",
)
def test_the_sentence_of_every_form(fields, sentence):
    assert refusal(**fields) == sentence


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"turbo": True, "boost": 2.0, "kind": "v12"},
        {"fuel": "diesel"},
        {"fuel": "petrol", "kind": "electric"},  # the rule is of diesel
        {"tune": "fast", "kind": "my:engine"},
        {"valves": 16, "gears": 5, "cylinders": 4, "banks": 2},
        {"cylinders": -1, "banks": 2, "idle": 3},  # their number is not known yet
        {"cylinders": 0, "idle": 3},  # 0 is no bound
    ],
    ids=lambda fields: "-".join(fields),
)
def test_what_keeps_all_rules(fields):
    assert refusal(**fields) == ""


def test_settings_that_nothing_reads_get_their_defaults():
    unread = Car(Engine(fuel="petrol", choke=3, boost=2.0, banks=2, cylinders=2))
    assert without_unread(unread) == Car(Engine(fuel="petrol", banks=2, cylinders=2))


def test_rules_are_listed_in_words():
    listed = declared_rules("engine", Engine)
    (rule,) = listed["turbo"]
    assert rule == "`engine.turbo` needs `engine.kind='v8'` or `engine.kind='v12'`."
    assert listed["fuel"] == [
        "`engine.fuel='diesel'` excludes `engine.kind='electric'`: it has none."
    ]
    assert listed["gears"] == ["`engine.gears` needs `engine.valves` above 1."]
    assert listed["valves"] == [
        "`engine.valves` must be a multiple of `engine.cylinders` x `engine.banks`."
    ]
