"""Which checkpoints of a run stay on disk: the newest, some others, and all of other runs.

Every checkpoint names the run that has saved it (`LINEAGE`), and a start that goes on from it keeps
the name, also in a copy of the directory. So a run never removes what another one has saved, not
even in a directory that was put in place of its own.
"""

import json
from collections.abc import Sequence
from typing import Any

from jaxpipe.checkpoint.integrity import DamagedError, read_meta
from jaxpipe.config import ConfigError
from jaxpipe.runtime.group import Group
from jaxpipe.runtime.storage.files import AnyPath

LINEAGE = "run"  # metadata entry: a word for the run that has saved the checkpoint


class Retention:
    """A preservation policy of Orbax.

    Args:
      directory: of the checkpoints.
      keep: newest checkpoints that stay.
      keep_every: steps between others that stay; 0: none.
      lineage: the run's word, until `continue_from` finds that of an earlier start.
    """

    def __init__(self, directory: AnyPath, keep: int, keep_every: int, lineage: str):
        self.lineage = lineage
        self._directory, self._keep, self._every = directory, keep, keep_every
        self._foreign: set[int] = set()
        self._unread: set[int] = set()  # of which the newest save does not know whose they are

    def continue_from(self, found: tuple[Any, dict[str, Any]]) -> tuple[Any, dict[str, Any]]:
        """Take the word of a restored `(state, meta)`, and return the two."""
        self.lineage = found[1].get(LINEAGE, self.lineage)
        return found

    def note_foreign(self, steps: Sequence[int], group: Group) -> None:
        """Find those of other runs that the next save would remove. All processes call it.

        One that cannot be read now stays too, until a later save can read it.
        """
        old = self._removable([*steps, max(steps, default=0) + 1]) - self._foreign
        self._unread = set()
        if old:
            found = group.from_first(
                "checkpoints of other runs", lambda: json.dumps(self._not_own(old))
            )
            foreign, unread = map(set, json.loads(found))
            self._foreign, self._unread = self._foreign | foreign, unread

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Which checkpoints stay; Orbax removes the others after a save."""
        removed = self._removable([info.step for info in checkpoints])
        removed -= self._foreign | self._unread
        return [info.step not in removed for info in checkpoints]

    def _removable(self, steps: Sequence[int]) -> set[int]:
        old = sorted(steps)[: -self._keep]
        return {step for step in old if not (self._every and step % self._every == 0)}

    def _not_own(self, steps: set[int]) -> tuple[list[int], list[int]]:
        """Steps of other runs, and those that cannot be read; older versions wrote no word."""
        foreign, unread = [], []
        for step in steps:
            try:
                word = read_meta(self._directory / str(step)).get(LINEAGE)
            except (DamagedError, ConfigError):
                foreign.append(step)
            except OSError:
                unread.append(step)
            else:
                foreign += [step] * (word not in (None, self.lineage))
        return foreign, unread
