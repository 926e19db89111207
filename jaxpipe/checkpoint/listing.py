"""The checkpoints on disk, found by the names of their directories."""

from pathlib import Path

from jaxpipe.config import ConfigError


def find_newest(path: Path, name: str, others: str = "") -> Path:
    """The directory of the newest checkpoint in `path`.

    Args:
      path: a run's directory, a directory of checkpoints, or a checkpoint, which is returned as it
        is.
      name: the argument that gave the path, for the message.
      others: other values that it may have, for the message.

    Raises `ConfigError` where there is no checkpoint.
    """
    path = path.absolute()
    for directory in (path, path / "checkpoints"):
        if (directory / "state").is_dir():
            return directory
        if steps := list_steps(directory):
            return directory / str(steps[-1])
    raise ConfigError(
        f"{name}={str(path)!r} holds no checkpoint: give {others}a run's directory, or that of one "
        f"checkpoint."
    )


def list_steps(directory: Path) -> list[int]:
    """Steps of the complete checkpoints in a directory of checkpoints, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())
