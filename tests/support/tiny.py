"""A second model family, for tests: no attention, its own sizes, two layer kinds."""

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpipe.core.contract import LayerKind, LayerOutput, StageFunctions
from jaxpipe.model.family import ModelConfig, ModelFamily, Positive
from jaxpipe.model.loss import count_valid, cross_entropy_sum


class TinyConfig(ModelConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every other layer is `widen` times as wide inside."""

    widen: Positive = 2

    def parameter_count(self):
        wide = sum(self.widen if i % 2 else 1 for i in range(self.n_layers))
        return 2 * self.d_model * (self.vocab_size + wide * self.d_model)

    def flops_per_token(self, seq_len):
        return 6 * self.parameter_count()

    def part(self, tp):
        return self

    def broken_rules(self, tp) -> Iterator[str]:
        if tp > 1:
            yield f"parallel.tp={tp}: devices cannot share a tiny layer; use parallel.tp=1."


@dataclass(frozen=True)
class Tiny:
    config: TinyConfig
    sharing: object = None
    ops: object = None
    loss: object = None

    @property
    def functions(self):
        def layer(params, x, context):
            return LayerOutput(x + jnp.tanh(x @ params["up"]) @ params["down"])

        def head(ends, x, rows):
            return cross_entropy_sum(x @ ends["head"], rows["targets"])

        kinds = {"narrow": LayerKind(layer), "wide": LayerKind(layer)}
        order = tuple("wide" if i % 2 else "narrow" for i in range(self.config.n_layers))
        return StageFunctions(
            lambda ends, rows: ends["embed"][rows["inputs"]],
            {name: kinds[name] for name in dict.fromkeys(order)},
            head,
            lambda rows: count_valid(rows["targets"]),
            order=order,
        )

    def init_embed_head(self, key):
        d, v = self.config.d_model, self.config.vocab_size
        embed = 0.1 * jax.random.normal(key, (v, d))
        return {"embed": embed, "head": embed.T}

    def init_layer(self, key, index, kind):
        d = self.config.d_model
        inside = d * (self.config.widen if kind == "wide" else 1)
        own = 0.1 * jax.random.normal(jax.random.fold_in(key, index), (d, inside))
        return {"up": own, "down": own.T}


TINY = ModelFamily("tiny", TinyConfig, {"tiny_2": {"n_layers": 2, "d_model": 8}}, model="tiny:Tiny")
