"""What must be set before jax starts. Importing this module does not import jax."""

import os

GPU_MEMORY_SHARE = "0.92"  # of a GPU that jax takes; its own default is 0.75


def usable_share() -> float:
    """Share of a GPU's memory that a run started in this environment would take."""
    return float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", GPU_MEMORY_SHARE))


def use_gpu_memory() -> None:
    """Let jax take most of a GPU's memory: the rest holds CUDA's context and NCCL's buffers.

    Call before the first use of jax. XLA_PYTHON_CLIENT_MEM_FRACTION, if set, is left as it is.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", GPU_MEMORY_SHARE)


def use_cpu_devices(count: int) -> None:
    """Make jax see `count` virtual CPU devices, on any number of cores.

    Call before the first use of jax; afterwards it raises jax's `RuntimeError`. XLA sizes its
    thread pool by NPROC: with fewer threads than devices, collectives can starve each other and
    hang (jax 0.10.2 on 2 cores). A rank may wait for a slow neighbour far longer than XLA's
    default of 40 seconds, so that limit is raised to ten minutes.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("NPROC", str(max(2 * count, os.cpu_count() or 1)))
    limit = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {limit}".strip()
    import jax

    jax.config.update("jax_platforms", "cpu")  # jax may be there: plans trace with it
    jax.config.update("jax_num_cpu_devices", count)
