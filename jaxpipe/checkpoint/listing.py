"""The checkpoints on disk, found by the names of their directories."""

import time
from collections.abc import Mapping
from typing import Any

from jaxpipe.checkpoint.compatibility import Check
from jaxpipe.config import ConfigError
from jaxpipe.config.paths import is_address
from jaxpipe.runtime.storage import files as storage
from jaxpipe.runtime.storage.errors import as_os_errors
from jaxpipe.runtime.storage.files import COMMIT, AnyPath, absolute

_LOOKS, _LOOK_SECONDS = 5, 0.2  # at a checkpoint that may be being removed


def find_newest(path: AnyPath, name: str, others: str = "") -> AnyPath:
    """The directory of the newest checkpoint in `path`.

    Args:
      path: a run's directory, a directory of checkpoints, or a checkpoint, which is returned as it
        is.
      name: the argument that gave the path, for the message.
      others: other values that it may have, for the message.

    Raises `ConfigError` where there is no checkpoint.
    """
    path = absolute(path)
    for directory in (path, path / "checkpoints"):
        if (directory / "state").is_dir():
            return directory
        if steps := list_steps(directory):
            return directory / str(steps[-1])
    raise ConfigError(
        f"{name}={str(path)!r} holds no checkpoint: give {others}a run's directory, or that of one "
        f"checkpoint."
    )


def list_steps(directory: AnyPath) -> list[int]:
    """Steps of the complete checkpoints in a directory of checkpoints, oldest first.

    On a disk a checkpoint gets its name when it is complete, in a store its file `COMMIT`.
    """
    if is_address(directory):
        with as_os_errors():
            directories = [path.parent for path in directory.glob(f"*/{COMMIT}")]
    else:
        directories = list(directory.iterdir()) if directory.is_dir() else []
    return sorted(int(path.name) for path in directories if path.name.isdecimal())


def named_by_step(check: Check | None) -> Check:
    """A check of a checkpoint's path and metadata: `check`, and that the path is named by the step.

    Orbax saves no step below the newest name, so a run could not save after a checkpoint that was
    renamed to a larger number.
    """

    def check_name(path: AnyPath, meta: dict[str, Any]) -> Mapping[str, Any]:
        if (step := meta.get("step")) != int(path.name):
            raise ConfigError(
                f"checkpoint {path} is of step {step}, so it was renamed: rename it to {step}, or "
                f"move it out of {path.parent}."
            )
        return check(path, meta) if check else {}

    return check_name


def list_unfinished(directory: AnyPath) -> list[AnyPath]:
    """Directories of saves that were not finished; other programs may be writing to them."""
    if not is_address(directory):
        return list(directory.glob("*.orbax-checkpoint-tmp*"))
    complete = set(list_steps(directory))
    with as_os_errors():
        steps = [path for path in directory.glob("*") if path.name.isdecimal()]
    return [path for path in steps if int(path.name) not in complete]


def is_complete(checkpoint: AnyPath) -> bool:
    """Whether a directory is that of a complete checkpoint."""
    if is_address(checkpoint):
        with as_os_errors():
            return (checkpoint / COMMIT).exists()
    # Orbax writes to a directory with this suffix and renames it when it is complete.
    unfinished = ".orbax-checkpoint-tmp" in checkpoint.name
    return not unfinished and all((checkpoint / name).is_dir() for name in ("state", "meta"))


def is_being_removed(checkpoint: AnyPath) -> bool:
    """Whether a checkpoint is gone or its files vanish now, as a run removes all but `keep`."""
    found: set[str] = set()
    for _ in range(_LOOKS):
        try:
            before, found = found, set(storage.list_files(absolute(checkpoint)))
        except OSError:  # its folders vanish too
            return True
        if not found or before - found or not is_complete(absolute(checkpoint)):
            return True
        time.sleep(_LOOK_SECONDS)
    return False


def check_writable(directory: AnyPath) -> None:
    """Raise `ConfigError` where checkpoints cannot be written to a directory."""
    try:
        storage.probe(directory)
    except OSError as error:
        raise ConfigError(
            f"checkpoints cannot be written to {directory} ({error.strerror}): make it a writable "
            f"directory or choose another run.dir."
        ) from error
