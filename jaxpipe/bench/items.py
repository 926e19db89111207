"""Commands of `bench report` on one GPU, most valuable first, at Llama-3 8B's layer sizes."""

from typing import NamedTuple

MODEL = "configs/llama3_8b_layers_1gpu.toml"
EXPERTS = "configs/qwen3_30b_a3b_pp2_ep4.toml"
_ONE = ("parallel.pp=1", "parallel.dp=1", "parallel.ep=1", "parallel.in_flight=0")
_LAYER = ("model.n_layers=1", "model.first_dense_layers=0")
_ON_CPU = {MODEL: "configs/quickstart.toml", EXPERTS: "configs/quickstart_moe.toml"}
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
    limit: int
    writes: bool = True


def list_items(*, cpu: bool) -> tuple[Item, ...]:
    """Return all items for one GPU; with `cpu`, the same items at tiny sizes on the CPU."""
    tiny = _TINY if cpu else ()
    repeats = ("--repeats", "1") if cpu else ()
    steps = ("--steps", "2") if cpu else ()

    def bench(what: str, config: str, *words: str, more: tuple[str, ...] = ()) -> tuple[str, ...]:
        named = {_key(word) for word in words}
        small = (word for word in tiny if _key(word) not in named)
        return ("jaxpipe.bench", what, _ON_CPU[config] if cpu else config, *words, *small, *more)

    def step(remat: str, *words: str) -> tuple[str, ...]:
        return bench("train", MODEL, f"train.remat={remat}", *words, more=steps)

    length = "64" if cpu else "32768"
    long = (f"train.seq_len={length}", f"model.max_seq_len={length}")
    two = ("parallel.pp=2", *(("runtime.cpu_devices=2",) if cpu else ()))
    return (
        Item("correct", "F, B and W in bfloat16 and fp8 beside float32",
             bench("correct", MODEL), 300),
        Item("ops", "F, B, W of a layer, head, update",
             bench("ops", MODEL, more=repeats), 240),
        Item("step-selective", "a step on one GPU", step("selective"), 240),
        Item("step-full", "a step that computes all again", step("full"), 240),
        Item("step-none", "a step that stores everything", step("none"), 240),
        Item("step-selective-fp8", "the same in 8-bit floats",
             step("selective", "train.fp8=delayed"), 240),
        Item("step-full-fp8", "the same in 8-bit floats", step("full", "train.fp8=delayed"), 240),
        Item("ops-fp8", "F, B, W of a layer in 8-bit floats",
             bench("ops", MODEL, "train.fp8=delayed", more=repeats), 240),
        Item("two-ranks", "two pipeline ranks, where there are two GPUs",
             step("selective", *two), 240),
        Item("experts", "a layer of 128 experts",
             bench("ops", EXPERTS, *_LAYER, *_ONE, more=("--layers", "1", *repeats)), 240),
        Item("packed", "rows of documents",
             step("selective", "data.packing=best_fit"), 240),
        Item("long", "attention over 32,768 tokens",
             bench("ops", MODEL, *long, more=("--layers", "1", *repeats)), 240),
        Item("tests", "the tests that need a GPU",
             ("pytest", "-m", "gpu", "tests/gpu", "-p", "no:cacheprovider"), 300,
             writes=False),
    )  # fmt: skip


def _key(word: str) -> str:
    return word.partition("=")[0]
