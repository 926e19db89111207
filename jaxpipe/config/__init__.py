"""The settings of a run and how they are read. Imports no jax."""

from jaxpipe.config.errors import ConfigError, first_line
from jaxpipe.config.reading import build, from_builtins, load, read_overrides, to_toml
from jaxpipe.config.sections import (
    CheckpointConfig,
    Config,
    DataConfig,
    DebugConfig,
    LogConfig,
    LoraConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    RuntimeConfig,
    SourceConfig,
    TrainConfig,
)

__all__ = [
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "DebugConfig",
    "LogConfig",
    "LoraConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RunConfig",
    "RuntimeConfig",
    "SourceConfig",
    "TrainConfig",
    "build",
    "first_line",
    "from_builtins",
    "load",
    "read_overrides",
    "to_toml",
]
