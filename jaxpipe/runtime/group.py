"""The calls that all processes of a run make together, as an object that is passed in.

Every call has a name. Processes meet at the number of the call and compare names, so processes
that diverge stop with both names instead of waiting for each other at different places.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping

from jaxpipe.config import ConfigError
from jaxpipe.runtime.coordination import Service
from jaxpipe.runtime.storage.errors import passes


class Group:
    """The processes of a run; a single one without a service, where every call returns at once.

    The main threads of all processes call the same methods in the same order.

    Attributes:
      index: of this process.
      count: number of processes.
      is_first: whether this is process 0.
    """

    def __init__(self, service: Service | None = None):
        self._service = service
        self.index: int = service.index if service else 0
        self.count: int = service.count if service else 1
        self.is_first = self.index == 0

    def gather(self, name: str, text: str) -> list[str]:
        """The texts of all processes, by process.

        Raises:
          DivergedError: in all processes, if one of them makes another call.
        """
        return self._service.gather(name, text) if self._service else [text]

    def barrier(self, name: str) -> None:
        """Wait until all processes are here."""
        self.gather(name, "")

    def largest(self, name: str, value: int) -> int:
        """The largest of the processes' values."""
        return max(map(int, self.gather(name, str(int(value)))))

    def any(self, name: str, condition: bool) -> bool:
        """Whether the condition holds in a process."""
        return bool(self.largest(name, condition))

    def from_first(self, name: str, text_of: Callable[[], str]) -> str:
        """The text that process 0 computes."""
        return self.gather(name, text_of() if self.is_first else "")[0]

    @contextlib.contextmanager
    def first_before_others(self, name: str) -> Iterator[None]:
        """Run the body in process 0, and only then in the others."""
        if not self.is_first:
            self.barrier(name)
        try:
            yield
        finally:
            if self.is_first:
                self.barrier(name)

    def refuse(self, name: str, reason: str, cause: BaseException | None = None) -> None:
        """Raise `ConfigError` in all processes if one gives a reason; "" is none.

        The exit code is the same in all, by `cause_in_all`.
        """
        reason = next(filter(None, self.gather(name, reason)), "")
        cause = self.cause_in_all(name, cause)
        if reason:
            raise ConfigError(reason) from cause

    def cause_in_all(self, name: str, error: BaseException | None) -> BaseException | None:
        """This process's error; without one, another's if that is that storage does not answer.

        All processes then end with the same exit code.
        """
        unanswered = self.any(f"cause of {name}", passes(error))
        return error or (ConnectionError("in another process") if unanswered else None)

    def check_alike(self, name: str, parts_of: Callable[[], Mapping[str, str]]) -> None:
        """Compare texts by name that must be equal in all processes.

        Processes that differ would deadlock or compute garbage.

        Raises:
          ConfigError: in all processes; it names the first entry in which a process differs from
            process 0.
        """
        if not self._service:
            return
        parts, reason = parts_of(), ""
        theirs = json.loads(self.from_first(name, lambda: json.dumps(parts)))
        for part in {**theirs, **parts}:
            own, first_has = (has.get(part, "nothing") for has in (parts, theirs))
            if own != first_has:
                reason = (
                    f"the processes of this run differ in {part}: {own} in process {self.index}, "
                    f"{first_has} in process 0; start all with the same command, files and "
                    f"versions."
                )
                break
        self.refuse(f"difference in {name}", reason)
