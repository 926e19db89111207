"""The plan of a model whose layers read embedding and head (`LayerKind.reads`)."""

from dataclasses import replace
from functools import cached_property
from pathlib import Path

import pytest
from resolving import resolved

from jaxpipe import config as configs
from jaxpipe.core.contract import Aux, LayerOutput
from jaxpipe.model import FAMILIES
from jaxpipe.model.families.llama.decoder import LlamaDecoder
from jaxpipe.planning.cost.costs import costs_of
from jaxpipe.planning.cost.memory import layout_of, rank_bytes

SMALL = Path(__file__).parents[1] / "data" / "small.toml"
VOCABULARY, WIDTH, LENGTH = 64, 32, 32


class Reading(LlamaDecoder):
    """A decoder whose every layer makes a loss with the head."""

    @cached_property
    def functions(self):
        functions = super().functions
        ends = replace(self, sharing=replace(self.sharing, embed_head_devices=None))
        (kind,) = functions.kinds.values()

        def layer(params, x, context):
            made = kind.layer(params, x, context)
            loss = ends.head(context.embed_head, made.y, context.rows).sum()
            return LayerOutput(made.y, made.state, Aux({"early": (loss, 1)}))

        kinds = {"layer": replace(kind, layer=layer, reads=("embed_head",))}
        return replace(functions, kinds=kinds)


def planned(model, monkeypatch, *, shared, tp=1):
    """Return costs and bytes of a model; costs are cached by configuration, not by model."""
    sizes = [f"model.vocab_size={VOCABULARY}", "parallel.pp=2", "parallel.dp=1", "model.n_layers=2"]
    sizes += [f"parallel.vocab_parallel_pp={str(shared).lower()}", f"parallel.tp={tp}"]
    sizes += [f"train.seq_len={LENGTH}", "parallel.schedule=zb_h1"]
    for cache in ("costs._traced", "costs._layers", "costs._embed_heads", "trace._kinds"):
        monkeypatch.setattr(f"jaxpipe.planning.cost.{cache}", {})
    monkeypatch.setitem(FAMILIES, "llama", replace(FAMILIES["llama"], model=model))
    plan = resolved(configs.load(SMALL, sizes), platform="cpu")
    assert plan.config.model.d_model == WIDTH
    layout = layout_of(plan.config, plan.schedule.placement, plan.layers)
    return costs_of(plan.config), rank_bytes(plan.config, layout, None)


@pytest.mark.parametrize(("shared", "tp"), [(False, 1), (True, 1), (True, 2)])
def test_only_ranks_that_share_the_vocabulary_need_more(monkeypatch, shared, tp):
    plain, bytes_of_plain = planned(FAMILIES["llama"].model, monkeypatch, shared=shared, tp=tp)
    costs, with_readers = planned(f"{__name__}:Reading", monkeypatch, shared=shared, tp=tp)
    assert (plain.reads, costs.reads) == (frozenset(), {"layer"})
    matrix = VOCABULARY * WIDTH // tp
    own, before = costs.kinds["layer"], plain.kinds["layer"]
    logits = 2 * LENGTH * matrix
    assert (logits,) * 3 == (own.F - before.F, own.B - before.B, own.W - before.W)
    gathered = shared * 4 * (2 * matrix + WIDTH)  # embedding and head, and the final norm
    assert with_readers.gradients - bytes_of_plain.gradients == gathered
    assert with_readers.copies - bytes_of_plain.copies == gathered
