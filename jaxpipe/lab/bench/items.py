"""Commands of `bench report` on one GPU, most valuable first, at Llama-3 8B's layer sizes."""

from typing import NamedTuple

MODEL = "configs/llama3_8b_layers_1gpu.toml"
EXPERTS = "configs/qwen3_30b_a3b_pp2_ep4.toml"
LATENT = "configs/deepseek_v2_lite_pp2_ep4.toml"
_ONE = (
    "parallel.pp=1", "parallel.dp=1", "parallel.ep=1", "parallel.schedule=1f1b",
    "parallel.in_flight=0",
)  # fmt: skip
_LAYER = (*_ONE, "model.n_layers=1", "model.first_dense_layers=0")
_ON_CPU = {
    MODEL: "configs/quickstart.toml",
    EXPERTS: "configs/quickstart_moe.toml",
    LATENT: "configs/quickstart_deepseek.toml",
}
_TINY = (
    *_ONE, "model.n_layers=2", "train.seq_len=64", "train.grad_accum_steps=2",
    "train.compute_dtype=bfloat16", "runtime.cpu_devices=1",
)  # fmt: skip


class Item(NamedTuple):
    """A command of the report.

    Attributes:
        name: key of its result.
        why: its purpose, for the log.
        words: of the command line, after `python -m`.
        limit: seconds after which the command is killed.
        writes: the command takes `--out FILE.json`.
    """

    name: str
    why: str
    words: tuple[str, ...]
    limit: int = 240
    writes: bool = True


def list_items(*, cpu: bool) -> tuple[Item, ...]:
    """Return all items for one GPU; with `cpu`, the same items at tiny sizes on the CPU."""

    def layer(experts: int, *words: str, config: str) -> tuple[str, ...]:
        """A layer with the experts of one device of four, which get as many rows as there."""
        sizes = (*_LAYER, f"model.n_experts={experts}", *words)
        return bench("ops", *sizes, "--layers", "1", config=config)

    def bench(what: str, *words: str, config: str = MODEL) -> tuple[str, ...]:
        options = {"ops": ("--repeats", "1"), "train": ("--steps", "2")}.get(what, ())
        if not cpu:
            return ("jaxpipe.bench", what, config, *words)
        named = {_key(word) for word in words}
        tiny = (word for word in _TINY if _key(word) not in named)
        return ("jaxpipe.bench", what, _ON_CPU[config], *tiny, *words, *options)

    length = 64 if cpu else 16384
    long = (f"train.seq_len={length}", f"model.max_seq_len={length}", "train.loss_chunks=8")
    two = ("parallel.pp=2", *(("runtime.cpu_devices=2",) if cpu else ()))
    selective, fp8 = "train.remat=selective", "train.fp8=delayed"
    return (
        Item("correct", "F, B and W in bfloat16 and fp8 beside float32", bench("correct"), 300),
        Item("ops", "F, B, W of a layer, head, update", bench("ops")),
        Item("step-selective", "a step on one GPU", bench("train", selective)),
        Item("step-unrolled", "the same without a loop over layers, each tick one CUDA graph",
             bench("train", selective, "parallel.unroll_layers=12")),
        Item("step-moments", "the same with moments on the host between updates",
             bench("train", selective, "train.offload_moments=true")),
        Item("step-full", "a step that recomputes all", bench("train", "train.remat=full")),
        Item("step-none", "a step that stores everything", bench("train", "train.remat=none")),
        Item("step-selective-fp8", "the same in fp8", bench("train", selective, fp8)),
        Item("step-full-fp8", "the same in fp8", bench("train", "train.remat=full", fp8)),
        Item("ops-fp8", "F, B, W of a layer in fp8", bench("ops", fp8)),
        Item("two-ranks", "two pipeline ranks, where there are two GPUs",
             bench("train", selective, *two)),
        Item("experts", "a layer of 32 experts", layer(32, config=EXPERTS)),
        Item("experts-grouped", "the same without a capacity",
             layer(32, "model.capacity_factor=0", config=EXPERTS)),
        Item("experts-grouped-fp8", "the same in fp8",
             layer(32, "model.capacity_factor=0", fp8, config=EXPERTS)),
        Item("latent", "a layer of latent attention and 16 experts", layer(16, config=LATENT)),
        Item("packed", "rows of at most 32 documents",
             bench("train", selective, "data.packing=best_fit", "data.max_documents=32")),
        Item("long", "attention over 16,384 tokens", bench("ops", *long, "--layers", "1")),
        Item("tests", "the tests that need a GPU",
             ("pytest", "-m", "gpu", "tests/lab/gpu", "-p", "no:cacheprovider"), 300,
             writes=False),
    )  # fmt: skip


def _key(word: str) -> str:
    return word.partition("=")[0]
