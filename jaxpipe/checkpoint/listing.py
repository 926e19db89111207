"""The checkpoints on disk, found by the names of their directories."""

from pathlib import Path

from jaxpipe.config import ConfigError


def find_newest(path: Path) -> Path:
    """The directory of the newest checkpoint in `path`.

    `path` is a run's directory, a directory of checkpoints, or a checkpoint, which is returned as
    it is. Raises `ConfigError` where there is no checkpoint.
    """
    path = path.absolute()
    for directory in (path, path / "checkpoints"):
        if (directory / "state").is_dir():
            return directory
        if steps := list_steps(directory):
            return directory / str(steps[-1])
    raise ConfigError(
        f"checkpoint.resume={str(path)!r} holds no checkpoint: give 'auto', 'none', a run's "
        f"directory, or that of one checkpoint."
    )


def list_steps(directory: Path) -> list[int]:
    """Steps of the complete checkpoints in a directory of checkpoints, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())
