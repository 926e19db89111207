"""The barrier at which processes meet during a save, and which a failed process does not block.

Orbax's processes wait for each other when all have written, and when the first has committed. A
process that cannot write goes on to the end of the save instead, where it waits for the others,
which would wait for it for 20 minutes. Here they see that it has gone on, and fail too.
"""

import itertools
import json
import time
from collections.abc import Callable

from jaxpipe.runtime import processes

_stores = itertools.count()  # of this process; all processes open them in the same order
_CLOSING = "set_value_start 2"  # where a save ends, with or without success
_LOOK_SECONDS = 0.05  # between two looks, and as much again for every ten processes


class SaveBarrier:
    """A barrier for `ocp.AsyncOptions.barrier_sync_fn`; processes post the places that they reach.

    Args:
      post, posted: of `runtime.processes`, which tests replace.
    """

    def __init__(
        self,
        post: Callable[[str, str], None] = processes.post,
        posted: Callable[[str], dict[int, str]] = processes.posted,
    ):
        self._post, self._posted, self._key = post, posted, f"jaxpipe/saving/{next(_stores)}"
        self._save = 0
        self._reached: list[str] = []

    def begin(self) -> None:
        """Begin a save; all processes call it, when they have ended the one before."""
        self._save, self._reached = self._save + 1, []

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Wait until all processes have reached this place of the save.

        Args:
          key: Orbax's name of the place.
          timeout_ms: the longest wait [ms].

        Raises:
          OSError: another process has left it out, because it could not write.
          TimeoutError: another process has not come in time.
        """
        kind = key.rpartition(":")[2].partition(".")[0]
        place = f"{kind} {1 + sum(one.startswith(f'{kind} ') for one in self._reached)}"
        self._reached.append(place)
        self._post(self._key, json.dumps([self._save, self._reached]))
        end, count = time.monotonic() + timeout_ms / 1000, processes.place()[1]
        while True:
            posted = [json.loads(text) for text in self._posted(self._key).values()]
            ahead = sum(save > self._save for save, _ in posted)
            reached = [reached for save, reached in posted if save == self._save]
            missing = count - ahead - sum(place in one for one in reached)
            if not missing:
                return
            # Each process closes its save, so one that closes it without this place has failed.
            failed = any(_CLOSING in one and place not in one for one in reached)
            if failed and _CLOSING not in self._reached:
                raise OSError("another process could not write its part")
            if time.monotonic() > end:
                raise TimeoutError(f"{missing} processes have not reached {key!r}")
            time.sleep(_LOOK_SECONDS * (1 + count // 10))
