"""Orbax's manager of the checkpoints in a directory, as a run uses it."""

from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxpipe.checkpoint.orbax_port.handler import make_state_handler
from jaxpipe.checkpoint.orbax_port.save_barrier import SaveBarrier
from jaxpipe.runtime.storage.files import AnyPath

_AS_LONG_AS_IT_MOVES = 30 * 86400  # seconds; the watchdog ends a save that does not move


class Manager(ocp.CheckpointManager):
    """Orbax's manager without jax's preemption service, which would take over SIGTERM."""

    def reached_preemption(self, step: int) -> bool:
        """Return False: a run that is preempted saves by itself."""
        return False


def open_manager(directory: AnyPath, retention: Any, barrier: SaveBarrier) -> Manager:
    """Orbax's manager for a state and its metadata.

    Args:
      directory: of the checkpoints.
      retention: the preservation policy.
      barrier: at which several processes meet.
    """
    # With `active_processes` Orbax synchronizes them by the coordination service. Its device
    # collective would run among the collectives of the steps.
    active = set(range(jax.process_count())) if jax.process_count() > 1 else None
    options = ocp.CheckpointManagerOptions(
        preservation_policy=retention,
        async_options=ocp.AsyncOptions(
            timeout_secs=_AS_LONG_AS_IT_MOVES, barrier_sync_fn=barrier if active else None
        ),
        create=False,
        multiprocessing_options=ocp.options.MultiprocessingOptions(active_processes=active),
    )
    handlers = {"state": make_state_handler(), "meta": ocp.JsonCheckpointHandler()}
    return Manager(directory, options=options, item_handlers=handlers)
