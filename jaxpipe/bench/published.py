"""Published figures of other trainers, with their sources, for comparison in a report."""

from typing import NamedTuple


class PublishedSpeed(NamedTuple):
    """Training speed of one model; None or "" where the source does not report a value.

    Attributes:
        what: trainer, model and GPUs.
        precision: of the matrix products.
        remat: recomputation.
        tokens: per second and GPU.
        tflops: model TFLOP/s per GPU; recomputation does not count.
        mfu: model FLOP/s as a share of the GPU's bf16 peak.
        memory: peak per GPU, GiB.
        source: of the figures.
    """

    what: str
    precision: str
    remat: str
    tokens: float | None
    tflops: float | None
    mfu: float | None
    memory: float | None
    source: str

    def cells(self) -> list[str]:
        """Return the cells of a table row."""

        def shown(value: float | None, how: str) -> str:
            return "" if value is None else format(value, how)

        return [
            self.what, self.precision, self.remat, shown(self.tokens, ",.0f"),
            shown(self.tflops, ",.3g"), shown(self.mfu, ".1%"), shown(self.memory, ".1f"),
            self.source,
        ]  # fmt: skip


def published_speeds() -> tuple[PublishedSpeed, ...]:
    """Return figures of dense models with 7 to 8 billion parameters on Hopper GPUs."""
    eight = "Llama-3 8B on 8 H100s"
    return (
        PublishedSpeed(f"torchtitan, {eight}", "bf16", "", 6667, None, 0.33, None,
            "benchmarks/llama3_h100_202412, which says 33 to 39 % MFU"),
        PublishedSpeed(f"torchtitan, {eight}", "fp8", "", 8532, None, None, None, "the same"),
        PublishedSpeed("torchtitan, Llama-3 8B on H200s", "fp8", "", 10938, None, None, None,
            "its benchmarks"),
        PublishedSpeed(f"Megatron-Bridge 25.11, {eight}", "fp8", "", 14451, 744, None, None,
            "docs/performance-summary-archive.md"),
        PublishedSpeed("swiss-ai Megatron, 8B", "bf16", "", None, 413, 0.42, None,
            "its repository, which says 413 to 430 TFLOP/s"),
        PublishedSpeed("KempnerForge, 7B on one H200", "bf16", "full", None, None, 0.578, None,
            "its repository"),
    )  # fmt: skip
