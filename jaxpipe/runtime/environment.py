"""Settings that must be made before jax starts. Importing this module does not import jax."""

import contextlib
import os
import resource

from jaxpipe.config import ConfigError

GPU_MEMORY_SHARE = "0.92"  # share of a GPU's memory that jax allocates; jax's default is 0.75


def usable_share() -> float:
    """Share of a GPU's memory that jax allocates for a run started in this environment.

    Raises `ConfigError` where XLA_PYTHON_CLIENT_MEM_FRACTION is no number above 0.
    """
    text = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", GPU_MEMORY_SHARE)
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < float("inf"):
        raise ConfigError(
            f"XLA_PYTHON_CLIENT_MEM_FRACTION={text} is no number above 0, the share of a GPU's "
            f"memory that jax allocates: unset it, or set it to one such as {GPU_MEMORY_SHARE}."
        )
    return share


def use_gpu_memory() -> None:
    """Let jax allocate most of a GPU's memory: the rest is for CUDA's context and NCCL's buffers.

    Call it before jax is first used. XLA_PYTHON_CLIENT_MEM_FRACTION, if set, takes precedence.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", GPU_MEMORY_SHARE)


def allow_open_files() -> None:
    """Allow as many open files as the system lets this process have: connections count as files."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # some systems have a smaller limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def use_cpu_devices(count: int) -> None:
    """Make jax see `count` virtual CPU devices, on any number of cores.

    Call it before jax is first used; afterwards it raises jax's `RuntimeError`. It raises
    `ConfigError` where NPROC is no number: XLA sizes its thread pool by it, since with fewer
    threads than devices collectives can starve each other and hang (jax 0.10.2 on 2 cores). A
    device may wait for a slow neighbour much longer than XLA's default limit of 40 seconds, so the
    limit is raised to ten minutes.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    threads = os.environ.setdefault("NPROC", str(max(2 * count, os.cpu_count() or 1)))
    if not threads.isdecimal() or not int(threads):
        raise ConfigError(
            f"NPROC={threads} is no number of threads, which XLA reads it as: unset it, or set it "
            f"to at least {2 * count}."
        )
    limit = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {limit}".strip()
    import jax

    from jaxpipe.core.jax_internals import give_collectives_channels
    from jaxpipe.runtime.programs.collective_order import store_loadable_programs

    give_collectives_channels()
    store_loadable_programs()
    jax.config.update("jax_platforms", "cpu")  # jax may already be imported: plans trace with it
    jax.config.update("jax_num_cpu_devices", count)
