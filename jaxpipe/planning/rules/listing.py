"""The rules across settings in words: those declared in `jaxpipe.config`, and those in code."""

import inspect
import re
from collections.abc import Callable
from itertools import chain
from typing import get_type_hints

from jaxpipe.config import Config
from jaxpipe.config.rules import declared_rules
from jaxpipe.model.attention import case as attention
from jaxpipe.model.decoder_config import DecoderConfig
from jaxpipe.model.families.deepseek.config import DeepseekConfig
from jaxpipe.model.families.deepseek_v4.config import DeepseekV4Config
from jaxpipe.model.families.engram.config import EngramConfig
from jaxpipe.model.families.kimi_linear.config import KimiLinearConfig
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.model.families.llama4.config import Llama4Config
from jaxpipe.model.families.nemotron_h.config import NemotronHConfig
from jaxpipe.model.family import ModelConfig
from jaxpipe.model.layers.moe.config import MixtureConfig
from jaxpipe.model.layers.rope.config import RotaryConfig
from jaxpipe.model.recurrent.config import HybridConfig
from jaxpipe.model.recurrent.delta_config import DeltaConfig
from jaxpipe.model.recurrent.mamba_config import MambaConfig
from jaxpipe.planning.loops import unroll_layers
from jaxpipe.planning.resolve import resolve
from jaxpipe.planning.rules import devices as device_checks
from jaxpipe.planning.rules import sizes as size_checks
from jaxpipe.planning.rules.across import CHECKS

# The functions whose docstrings state the rules, in paragraphs that begin with a setting.
RULES: tuple[Callable[..., object], ...] = (
    *CHECKS,
    ModelConfig.unmet_by_attention,
    attention.xla_supports,
    attention.cudnn_supports,
    attention.cudnn_takes,
    attention.cudnn_takes_packed,
    DecoderConfig._unequal_shares,
    DecoderConfig.unequal_parts,
    MixtureConfig._unread,
    MixtureConfig.broken_mixture_rules,
    LlamaConfig.broken_rules,
    Llama4Config.broken_rules,
    DeepseekConfig.broken_rules,
    DeepseekV4Config.unmet_by_attention,
    EngramConfig.broken_rules,
    HybridConfig.broken_rules,
    DeltaConfig.broken_rules,
    DeltaConfig.unmet_by_attention,
    KimiLinearConfig.broken_rules,
    KimiLinearConfig.unmet_by_attention,
    MambaConfig.broken_rules,
    MambaConfig.unmet_by_attention,
    NemotronHConfig.broken_rules,
    RotaryConfig.broken_rotary_rules,
    *size_checks.CHECKS,
    *device_checks.CHECKS,
    resolve,
    unroll_layers,
)


def rules() -> list[tuple[str, str]]:
    """Return the section and sentence of every rule, grouped by section.

    A rule in code is a paragraph of its check's docstring that begins with a setting, which gives
    the section.
    """
    by_section = {
        section: list(chain.from_iterable(declared_rules(section, record).values()))
        for section, record in get_type_hints(Config).items()
        if section != "model"  # its rules are those of families
    } | {"model": []}
    for check in RULES:
        for paragraph in (inspect.getdoc(check) or "").split("\n\n"):
            if setting := re.match(r"`(\w+)\.", paragraph):
                by_section[setting[1]].append(" ".join(paragraph.split()))
    return [(section, rule) for section, of_it in by_section.items() for rule in of_it]


def rules_table() -> str:
    """Return the rules as a table in Markdown."""
    rows = [f"| `[{section}]` | {rule} |" for section, rule in rules()]
    return "\n".join(["| section | rule |", "|---|---|", *rows])
