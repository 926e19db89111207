"""The settings of a run: what they are, and how they are read. Nothing here needs jax."""

from jaxpipe.config.errors import ConfigError, first_line
from jaxpipe.config.reading import load, to_toml
from jaxpipe.config.sections import (
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    RuntimeConfig,
    TrainConfig,
)

__all__ = [
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "LogConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RunConfig",
    "RuntimeConfig",
    "TrainConfig",
    "first_line",
    "load",
    "to_toml",
]
