"""The settings of a run and how they are read. Imports no jax."""

from jaxpipe.config.errors import ConfigError, first_line
from jaxpipe.config.reading import from_builtins, load, to_toml
from jaxpipe.config.sections import (
    CheckpointConfig,
    Config,
    DataConfig,
    DebugConfig,
    LogConfig,
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
    "OptimizerConfig",
    "ParallelConfig",
    "RunConfig",
    "RuntimeConfig",
    "SourceConfig",
    "TrainConfig",
    "first_line",
    "from_builtins",
    "load",
    "to_toml",
]
