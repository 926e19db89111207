"""A process that saves or restores, and prints the memory that this takes.

`python io_memory.py save|restore DIRECTORY PP`: prints a JSON object of bytes. `share` is the
process's share of the state, `extra` its peak memory beyond the memory that it had before.
"""

import ctypes
import gc
import json
import sys
from pathlib import Path

from jaxpipe import config as configs
from jaxpipe.runtime import processes
from jaxpipe.runtime.environment import use_cpu_devices

SIZES = {"n_layers": 8, "d_model": 1536, "d_ff": 1536, "n_heads": 24, "n_kv_heads": 24,
         "vocab_size": 256}  # fmt: skip
# Matrices of 9 MiB: glibc may keep freed blocks of less than 32 MiB.


def main(mode, directory, pp):
    use_cpu_devices(int(pp) // processes.started())
    processes.join()
    import jax

    from jaxpipe.checkpoint import CheckpointStore, StateKeying
    from jaxpipe.training.trainer import Trainer

    overrides = [f"model.{name}={size}" for name, size in SIZES.items()]
    overrides += [f"parallel.pp={pp}", "parallel.dp=1"]
    small = Path(__file__).parents[1] / "data" / "small.toml"
    trainer = Trainer.resolve(configs.load(small, overrides))
    keying = StateKeying(trainer.layout, trainer.sharding)
    with CheckpointStore(Path(directory), keep=1, asynchronous=False, keying=keying) as checkpoints:
        state = jax.block_until_ready(trainer.init()) if mode == "save" else None
        gc.collect()
        held = [state]

        def save():
            checkpoints.save(1, state.parts(), {})

        def restore():
            held[0], _ = checkpoints.restore(trainer.state_shapes.parts(), print)
            jax.block_until_ready(held[0])

        extra = extra_memory(save if mode == "save" else restore)
        share = sum(s.data.nbytes for leaf in jax.tree.leaves(held) for s in
                    leaf.addressable_shards)  # fmt: skip
        sys.stdout.write(json.dumps({"share": share, "extra": extra}) + "\n")
    processes.finish()


def extra_memory(run):
    """Return the bytes by which resident memory (RSS) peaks during the call.

    Freed blocks are returned to the system first.
    """
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, VmHWM
    before = resident_bytes("VmRSS")
    run()
    return resident_bytes("VmHWM") - before


def resident_bytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    (entry,) = (line for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(entry.split()[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
