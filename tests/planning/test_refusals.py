"""Refused configurations: by their form when they are read, by the rules afterwards."""

from pathlib import Path

import pytest
from resolving import resolved

from jaxpipe.config import ConfigError, load
from jaxpipe.planning.rules.across import check_settings

BASE = Path(__file__).parents[1] / "data" / "base.toml"
GPT_OSS = BASE.parents[2] / "configs" / "gpt_oss_20b_pp2_ep4.toml"
SHARED = ("parallel.pp=1", "parallel.dp=2", "parallel.cp=2")
FUSED_RING = (
    "parallel.cp_method=ring", "model.attention=cudnn", "train.compute_dtype=bfloat16",
)  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.ppp=2"], "unknown key parallel.ppp: did you mean parallel.pp\\?"),
        (["paralel.pp=2"], "unknown section .paralel.: did you mean .parallel.\\?"),
        (
            ["distributed.pp=2"],
            "unknown section .distributed.: did you mean .parallel.\\? Sections are run, model",
        ),
        (
            ["parallel.vocab_parallel_pp=maybe"],
            "unknown parallel.vocab_parallel_pp='maybe': use one of 'auto', true, false",
        ),
        (
            ["parallel.reshard_after_forward=never"],
            "unknown parallel.reshard_after_forward='never': use one of 'auto', true, false",
        ),
        (["parallel=2"], "override 'parallel=2' is not of the form section.key=value"),
        (["parallel.pp"], "override 'parallel.pp' is not of the form section.key=value"),
        (["parallel.pp='two'"], "parallel.pp: expected `int`, got 'two'"),
        (["train.seq_len=1"], "train.seq_len: expected `int` >= 2, got 1"),
        (
            ["data.sources=[{path='a', weight=-1}]"],
            r"data.sources\[0\].weight: expected `float` >= 0.0, got -1\.$",
        ),
        (["data.sources=[{Pth='a'}]"], r"data.sources\[0\].Pth: did you mean path"),
        (["parallel.pp=0"], "parallel.pp: expected `int` >= 1, got 0"),
        (["parallel.pp=2.5"], "parallel.pp: expected `int`, got 2.5"),
        (["optimizer.lr=-1"], "optimizer.lr: expected `float` > 0.0, got -1"),
        (["optimizer.min_lr_ratio=2"], "optimizer.min_lr_ratio: expected `float` <= 1.0, got 2"),
        (["optimizer.beta1=1"], "optimizer.beta1: expected `float` < 1.0, got 1"),
        (["optimizer.lr=nan"], "optimizer.lr: expected `float` > 0.0, got nan"),
        (["optimizer.clip_norm=inf"], "optimizer.clip_norm=inf is not finite"),
        (["model.norm_eps=0"], "model.norm_eps: expected `float` > 0.0, got 0"),
        (["model.rope_theta=-1"], "model.rope_theta: expected `float` > 0.0, got -1"),
        (
            ["optimizer.decay=step"],
            "unknown optimizer.decay='step': use one of 'cosine', 'wsd', 'wsd_sqrt', 'linear', ",
        ),
        (
            ["parallel.layer_split=odd"],
            "layer_split='odd': use one of 'even', 'weighted', 'balanced', a list of integers",
        ),
        (["parallel.transfer_ticks=3"], "unknown parallel.transfer_ticks=3: use one of 0, 1, 2"),
        (["parallel.layer_split=[2,'a']"], "parallel.layer_split\\[1\\]: expected `int`"),
        (["model.preset=[1]"], "model.preset: expected `str`, got \\[1\\]"),
        (["train.seed=-1"], "train.seed: expected `int` >= 0"),
        (["data.heldout_fraction=1.0"], "data.heldout_fraction: expected `float` < 1.0"),
        (["model.family=['llama']"], r"unknown model.family=\['llama'\]: .*use one of llama, "),
        (
            ["run.dir=2026-11-26"],
            r"expected `str`, got datetime.date.*: quote it, in a shell as '\"",
        ),
        (
            ["model.preset=gpt5"],
            r"unknown model.preset='gpt5': did you mean gpt2\? use one of llama3_8b",
        ),
        (["parallel.memory_limit=0"], "parallel.memory_limit: expected `float` > 0.0, got 0"),
        (["log.progress=1"], "log.progress: expected `bool`, got 1"),
    ],
)
def test_load_rejects(overrides, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load(BASE, overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.dp=2"], "pp=2 x parallel.dp=2 x parallel.tp=1 = 4 must equal .* devices, 2"),
        (["parallel.tp=3"], "model.n_heads=4 must be a multiple of parallel.tp=3"),
        (["parallel.tp=4", "model.d_ff=130"], "model.d_ff=130 must be a multiple of parallel.tp=4"),
        (
            ["parallel.tp=4", "model.n_heads=24", "model.n_kv_heads=6", "model.head_dim=16"],
            "model.n_kv_heads=6 and parallel.tp=4: one must be a multiple of the other",
        ),
        (
            ["parallel.tp=4", "parallel.sequence_parallel=true", "train.seq_len=30"],
            "train.seq_len=30 must be a multiple of parallel.tp=4",
        ),
        (
            ["parallel.slices=2", "parallel.overlap_halves=true", "parallel.tp=2"],
            "microbatch_size=1 halves sequences, which parallel.slices=2 excludes: .* such as 2",
        ),
        (
            ["parallel.cp=2", "parallel.dp=2", "parallel.pp=1", "parallel.overlap_halves=true"],
            "microbatch_size=1 halves sequences, which parallel.cp=2 excludes: .* such as 2",
        ),
        (
            ["parallel.tp=2", "parallel.overlap_halves=true", "train.seq_len=31"],
            "seq_len=31 must be a multiple of halves of parallel.overlap_halves=2",
        ),
        (
            ["parallel.overlap_halves=true", "train.microbatch_size=2"],
            "overlap_halves=true with parallel.tp=1, parallel.ep=1 and .* no collectives to hide",
        ),
        (["parallel.sdp=2"], "parallel.sdp is now parallel.cp: give parallel.cp=2 instead"),
        (
            [*SHARED, "parallel.cp_method=ring", "train.seq_len=30"],
            "train.seq_len=30 must be a multiple of blocks of a ring=4: it is cut into equ",
        ),
        (
            [*SHARED, "parallel.cp_method=ring", "parallel.slices=2", "train.seq_len=36"],
            "train.seq_len=36 must be a multiple of parallel.slices=2 x blocks of a ring=4",
        ),
        (
            [*SHARED, "parallel.cp_method=ring", "model.attention=cudnn"],
            "takes bfloat16 or float16, .* but these are float32 of width 16: .*attention=xla",
        ),
        (
            [*SHARED, *FUSED_RING, "data.packing=sequential"],
            "'ring' and model.attention='cudnn' with data.packing: .* parallel.cp_method=ulysses",
        ),
        (
            [*SHARED, *FUSED_RING, "model.sliding_window=4"],
            "'cudnn' with a window of 4 tokens: .* set model.attention=xla",
        ),
        (
            [*SHARED, "parallel.cp_method=ring", "model.attention_dropout=0.1"],
            "model.attention_dropout=0.1 with replicas that share .* set parallel.cp_method=gather",
        ),
        (
            [
                *SHARED,
                "parallel.cp_method=ulysses",
                "model.n_heads=3",
                "model.n_kv_heads=1",
                "model.head_dim=8",
            ],
            "2 replicas exchange heads .* of the 3 heads and 1 .* and parallel.cp_heads=1, or",
        ),
        (
            [
                "parallel.pp=1",
                "parallel.dp=4",
                "parallel.cp=4",
                "parallel.cp_method=ulysses",
                "model.n_heads=12",
                "model.n_kv_heads=6",
                "model.head_dim=8",
            ],
            "4 replicas exchange heads .* of the 12 heads and 6 .* and parallel.cp_heads=2, or",
        ),
        (["parallel.cp_method=rings"], "unknown parallel.cp_method='rings': did you mean 'ring'"),
        (["parallel.dp=0"], "parallel.dp=0: give at least 1; or -1 for all devices that there are"),
        (
            ["parallel.dp=-1"],
            "parallel.dp=-1: give at least 1; or -1 for all .* commands that know",
        ),
        (
            ["parallel.pp=1", "parallel.dp=2", "parallel.cp=2", "train.seq_len=31"],
            "train.seq_len=31 must be a multiple of parallel.cp=2: it is cut into equal parts",
        ),
        (
            ["parallel.pp=1", "parallel.dp=2", "parallel.cp=2", "train.loss_chunks=32"],
            "train.seq_len=32 must be a multiple of parallel.cp=2 x train.loss_chunks=32",
        ),
        (
            ["parallel.slices=3"],
            "train.seq_len=32 must be a multiple of parallel.slices=3: it is cut into equal parts",
        ),
        (
            ["parallel.slices=2", "parallel.schedule=zbv"],
            "zbv has no slices: leave slices=2 out, or use one of gpipe, 1f1b, interleaved_1f1b, ",
        ),
        (
            ["parallel.pp=4", "parallel.slices=2", "train.grad_accum_steps=1"],
            "grad_accum_steps=1 of parallel.slices=2 cannot fill parallel.pp=4 under 1f1b: use at "
            "least 2",
        ),
        (["parallel.tp=2"], "must divide the 1 devices of a host"),
        (
            ["parallel.schedule=interleaved_1f1b", "parallel.virtual_stages=1"],
            "parallel.schedule='interleaved_1f1b' with parallel.virtual_stages=1: .* use 2 or more",
        ),
        (["optimizer.name=:"], "optimizer.name=':' names no module: give it as module:function"),
        (["train.loss_chunks=5"], "train.seq_len=32 must be a multiple of train.loss_chunks=5"),
        (["model.n_kv_heads=3"], "model.n_heads=4 must be a multiple of model.n_kv_heads=3"),
        (["model.d_model=66"], "model.d_model=66 must be a multiple of model.n_heads=4"),
        (["model.head_dim=7"], "the rotated width of a head is 7"),
        (["model.rotary_share=0.01"], "the rotated width of a head is 0"),
        (
            ["model.family=olmo2", "model.n_kv_heads=1", "parallel.tp=2"],
            "model.n_kv_heads=1 must be a multiple of parallel.tp=2 in models of the family 'olmo",
        ),
        (
            ["parallel.schedule=2f2b"],
            "parallel.schedule: unknown schedule '2f2b': Choose one of gpipe, 1f1b",
        ),
        (["parallel.virtual_stages=2"], "1f1b has no virtual_stages: leave virtual_stages=2 out"),
        (["parallel.schedule=zb_auto", "parallel.memory_limit=3p"], "use '1p', '2p', a number of"),
        (["parallel.schedule=zb_auto", "parallel.memory_limit=0.5"], "memory_limit=0.5"),
        (["parallel.memory_limit=1"], "the least that works for it is 2"),
        (["parallel.costs=none.json"], "cannot read op seconds from none.json"),
        (["parallel.schedule=dualpipe", "parallel.pp=3"], "dualpipe needs an even pp"),
        (["parallel.schedule=dualpipev", "train.grad_accum_steps=1"], "needs at least 2 pp micro"),
        (["parallel.schedule=zbv", "parallel.pp=4"], "4 layers cannot fill 8 stages"),
        (["parallel.pp=5"], "is too much for model.n_layers=4: .* at most parallel.pp=4"),
        (["parallel.layer_split=[2,1]"], r"layer split \[2, 1\] has 2 entries with sum 3"),
        (["parallel.pp=3", "parallel.layer_split=[2,0,2]"], "leaves stage 1 without one"),
        (["train.grad_accum_steps=1"], "grad_accum_steps=1 cannot fill parallel.pp=2 under 1f1b"),
        (["data.sources=[{path='a.bin', weight=0}]"], r"shares of the samples, but .* \[0.0\]"),
        (["data.sources=[{path=''}]"], "a table of data.sources has an empty path"),
        (["data.heldout_path=x"], "only with data.source='file' or data.sources, but .* 'stdlib'"),
        (["data.ignore_columns=['a']"], "data.ignore_columns=.'a'. is read only with data.sour"),
    ],
)
def test_validate_rejects(overrides, message):
    count = {"count": 2} if "must equal" in message else {}
    with pytest.raises(ConfigError, match=message) as caught:
        resolved(load(BASE, overrides), per_host=1, **count)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.cp=2"], "parallel.cp_method='gather' masks keys, .* for the attention sinks"),
        (["parallel.slices=2"], "parallel.slices with model.sliding_window=128 masks .* sinks"),
        (
            ["parallel.cp=2", "parallel.cp_method=ring"],
            "parallel.cp_method='ring' and model.attention='cudnn' with a window of 128 tokens",
        ),
        (["model.rope_scaling=ntk"], "unknown model.rope_scaling='ntk': use one of 'llama3', 'ya"),
    ],
)
def test_gpt_oss_excludes(overrides, message):
    with pytest.raises(ConfigError, match=message) as caught:
        check_settings(load(GPT_OSS, overrides))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["parallel.slices=2", "parallel.cp=2", "parallel.dp=2", "train.seq_len=256"],
            "seq_len=256 must be a multiple of parallel.slices=2 x parallel.cp=2 x tokens of the "
            "model's entries=128: it is cut into equal parts",
        ),
        (
            ["parallel.slices=2", "train.variable_length=true", "train.pad_to_multiple_of=64"],
            "pad_to_multiple_of=64 must be a multiple of the 128 tokens of the model's entries",
        ),
        (
            ["parallel.cp=2", "parallel.dp=2", "parallel.cp_method=ring"],
            "parallel.cp_method must be 'gather' with parallel.cp=2 in models of the family",
        ),
    ],
)
def test_deepseek_v4_excludes(overrides, message, tmp_path):
    others = BASE.read_text().partition("[parallel]")[2]
    path = tmp_path / "config.toml"
    path.write_text(f"[model]\npreset = 'deepseek_v4_flash'\n[parallel]{others}")
    with pytest.raises(ConfigError, match=message) as caught:
        check_settings(load(path, ["train.seq_len=512", *overrides]))
    assert "\n" not in str(caught.value)
