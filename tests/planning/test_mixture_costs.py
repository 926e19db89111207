"""Traced costs of layers with experts against closed forms: FLOPs, bytes sent. All exact."""

from itertools import product
from math import comb, prod

import jax
import pytest
from commands import SMALL
from oracles.mixture import exchanged_bytes, sparse_layer_flops

from jaxpipe import config as configs
from jaxpipe.config import Config, ParallelConfig, TrainConfig
from jaxpipe.core.split import POLICIES
from jaxpipe.model.families.llama.config import LlamaConfig
from jaxpipe.plan import main
from jaxpipe.planning import Hardware, analytic, arrange, costs_of, estimate
from jaxpipe.planning.cost.compute import seconds_by_kind
from jaxpipe.training.trainer import Trainer

BATCH, LENGTH = 2, 16
MODELS = {
    "dropless": {},
    "capacity": {"capacity_factor": 1.25},
    "shared": {"shared_experts": 2, "router_score": "sigmoid", "router_bias_rate": 0.1},
}
MESHES = [
    {}, {"ep": 2}, {"ep": 4, "factor": 1.5}, {"ep": 2, "tp": 2}, {"ep": 4, "tp": 2, "over_tp": True}
]  # fmt: skip
SPARSE = (
    "model.n_experts=8", "model.experts_per_token=2", "model.d_expert=32",
    "model.first_dense_layers=1", "train.grad_accum_steps=8",
)  # fmt: skip


@pytest.mark.slow(unless=["dropless-*-{'ep': 2, 'tp': 2}", "shared-full-*"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(("name", "remat"), list(product(MODELS, POLICIES)))
def test_flops_and_bytes_sent(name, remat, mesh):
    model = LlamaConfig(
        n_layers=2, d_model=24, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=40, vocab_size=64,
        n_experts=8, experts_per_token=3, d_expert=12, **MODELS[name],
    )  # fmt: skip
    ep, factor = mesh.get("ep", 1), mesh.get("factor", 0.0)
    if model.capacity_factor:
        factor = 0.0
    over_tp, tp = mesh.get("over_tp", False), mesh.get("tp", 1)
    parallel = ParallelConfig(
        dp=ep // tp if over_tp else ep, ep=ep, tp=tp, ep_buffer_factor=factor, ep_over_tp=over_tp,
        sequence_parallel=over_tp,
    )  # fmt: skip
    train = TrainConfig(
        steps=1, grad_accum_steps=1, microbatch_size=BATCH, seq_len=LENGTH,
        compute_dtype="bfloat16", remat=remat,
    )  # fmt: skip
    layer = costs_of(Config(model=model, parallel=parallel, train=train)).kinds["sparse"]
    sizes = {"batch": BATCH, "seq_len": LENGTH, "remat": remat, "ep": ep, "factor": factor}
    work = sparse_layer_flops(model, **sizes, tp=parallel.tp, over_tp=over_tp)
    assert (layer.F, layer.B, layer.W) == (work.F, work.B, work.W)
    if over_tp:
        sizes["seq_len"] = LENGTH // tp
    sent = exchanged_bytes(model, **sizes, itemsize=2)
    assert layer.exchanged == {"F": sent.F, "B": sent.B, "W": sent.W, "R": 0}


@pytest.mark.parametrize("capacity", [0.0, 1.25])
def test_whole_experts_halve_what_two_devices_of_a_layer_send(capacity):
    """A layer of Qwen3-235B on 32 devices that share its experts, over ep and over tp."""
    model = LlamaConfig(
        n_layers=1, d_model=4096, n_heads=64, n_kv_heads=4, head_dim=128, d_ff=12288,
        vocab_size=64, n_experts=128, experts_per_token=8, d_expert=1536, capacity_factor=capacity,
    )  # fmt: skip
    train = TrainConfig(
        steps=1, grad_accum_steps=1, microbatch_size=1, seq_len=4096, compute_dtype="bfloat16"
    )
    sent = []
    for dp, over_tp in ((32, False), (16, True)):
        parallel = ParallelConfig(
            dp=dp, ep=32, tp=2, sequence_parallel=True, ep_over_tp=over_tp, ep_buffer_factor=0
        )
        layer = costs_of(Config(model=model, parallel=parallel, train=train)).kinds["sparse"]
        sent.append((layer.exchanged, layer.tensor))
    (alone, over_width), (halved, over_tokens) = sent
    for op in "FB":
        assert 0 < halved[op] <= 0.55 * alone[op]
        assert over_tokens[op] <= 0.55 * over_width[op]  # nor are tokens gathered for experts


@pytest.mark.parametrize("factor", [0.0, 1.25])
def test_two_stages_send_a_token_to_each_host_once(factor):
    """A layer of Qwen3-235B on four hosts of eight devices; dropless, by the shapes of buffers."""
    experts, each, hosts, per_host = 128, 8, 4, 8
    ep = hosts * per_host
    model = LlamaConfig(
        n_layers=1, d_model=4096, n_heads=64, n_kv_heads=4, head_dim=128, d_ff=12288,
        vocab_size=64, n_experts=experts, experts_per_token=each, d_expert=1536,
    )  # fmt: skip
    train = TrainConfig(
        steps=1, grad_accum_steps=1, microbatch_size=1, seq_len=4096, compute_dtype="bfloat16"
    )
    one, two = (
        costs_of(
            Config(
                model=model, train=train,
                parallel=ParallelConfig(dp=ep, ep=ep, ep_per_host=size, ep_buffer_factor=factor),
            )
        ).kinds["sparse"]
        for size in (1, per_host)
    )  # fmt: skip
    reached = hosts * (1 - comb(experts - experts // hosts, each) / comb(experts, each))
    in_a_host = each / reached  # mean number of a token's experts in a host that has some
    if not factor:  # the worst case: all tokens to all experts of each device, and to each host
        in_a_host = per_host * min(each, experts // ep)
    for op in "FB":
        straight = one.exchanged[op] * (ep - per_host) / (ep - 1)  # leaves the host
        assert one.spread[op] == 0
        assert two.exchanged[op] - two.spread[op] <= 1.01 * straight / in_a_host
        assert two.spread[op] > 0


def test_two_stages_take_the_time_of_their_links():
    """Over one network card of a device; in the host the links are a hundred times as fast."""
    how = ("parallel.pp=1", "parallel.ep=4", "parallel.ep_buffer_factor=1.5")
    machine = {"network": 1e8, "link": 1e10}
    config, straight = estimate_of(*how, **machine)
    staged, spread = estimate_of(*how, "parallel.ep_per_host=2", **machine)
    sent = sum(costs_of(staged).kinds["sparse"].exchanged.values())
    between = sent - sum(costs_of(staged).kinds["sparse"].spread.values())
    assert between < sum(costs_of(config).kinds["sparse"].exchanged.values())
    assert 0 < spread.exposed < straight.exposed


def estimate_of(*overrides, **hardware):
    config = configs.load(
        SMALL, [*SPARSE, "parallel.dp=4", "parallel.transfer_ticks=2", *overrides]
    )
    machine = Hardware(per_host=1, network_latency=0.0, **hardware)
    return config, estimate(arrange(config), analytic(config, machine))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(("ep", "zero"), [(1, 2), (2, 2), (4, 3), (4, 0), ("over tp", 2)])
def test_bytes_are_the_trainers(ep, zero, optimizer):
    shared = (f"parallel.ep={ep}",)
    if ep == "over tp":
        shared = ("parallel.dp=2", "parallel.tp=2", "parallel.sequence_parallel=true",
                  "parallel.ep=4", "parallel.ep_over_tp=true")  # fmt: skip
    config, estimated = estimate_of(
        "parallel.pp=2", *shared, f"parallel.zero_stage={zero}", f"optimizer.name={optimizer}",
    )  # fmt: skip
    trainer = Trainer.resolve(config)

    def on_a_device(part):
        shapes, shardings = (
            jax.tree.leaves(getattr(trees, part))
            for trees in (trainer.state_shapes, trainer.state_shardings)
        )
        held = zip(shapes, shardings)
        # Counters and the coefficients of Muon's iteration are no moments.
        return 4 * sum(prod(at.shard_shape(leaf.shape)) for leaf, at in held if leaf.size > 16)

    assert estimated.bytes.parameters == on_a_device("params")
    assert estimated.bytes.optimizer == on_a_device("optimizer")


def test_all_to_alls_take_time_and_hide_in_pairs():
    """Behind the other half's compute in cells of DualPipeV, behind nothing in 1F1B."""
    on = ("parallel.ep=4", "model.n_layers=8")
    config, alone = estimate_of(*on, "parallel.pp=1", network=1e8)
    sent = sum(costs_of(config).kinds["sparse"].exchanged.values())
    hidden = seconds_by_kind(config, Hardware())["sparse"].BW
    waits = sent / 0.85e8 - hidden
    assert alone.exposed == pytest.approx(7 * 8 * waits)  # of 7 layers and 8 microbatches
    shares = []
    for name in ("1f1b", "dualpipev"):
        how = (*on, "parallel.pp=2", f"parallel.schedule={name}")
        _, one = estimate_of(*how, network=1e12)  # with 1e13 they overlap with idle time
        assert one.exposed > 0
        _, free = estimate_of(*how, network=1e30)
        without = one.seconds - one.exposed - one.update
        assert without == pytest.approx(free.seconds - free.update, rel=1e-5)
        shares.append(one.exposed / without)
    assert shares[1] < 0.7 * shares[0]  # 0.605; those of BW are hidden in 1F1B, too


@pytest.mark.extended
def test_a_plan_says_what_goes_over_the_network(capsys):
    words = [str(SMALL), *SPARSE, "parallel.pp=1", "parallel.dp=4", "parallel.ep=4"]
    assert main(words) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "for a token), pp=1 dp=4 ep=4" in text
    assert "stored exposed" in text
    assert "over ep=4: MiB that a device sends for a layer of kind sparse and microbatch" in text
