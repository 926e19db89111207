"""The settings of a run and how they are read. Imports no jax."""

from jaxpipe.config.errors import ConfigError, first_line
from jaxpipe.config.files import CheckpointConfig, DataConfig, RunConfig, SourceConfig
from jaxpipe.config.functions import is_custom, load_function
from jaxpipe.config.reading import (
    build,
    from_builtins,
    load,
    read_overrides,
    to_builtins,
    to_toml,
)
from jaxpipe.config.secrets import mask_secrets
from jaxpipe.config.sections import (
    Config,
    DebugConfig,
    LogConfig,
    LoraConfig,
    OptimizerConfig,
    ParallelConfig,
    PreferenceConfig,
    RuntimeConfig,
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
    "PreferenceConfig",
    "RunConfig",
    "RuntimeConfig",
    "SourceConfig",
    "TrainConfig",
    "build",
    "first_line",
    "from_builtins",
    "is_custom",
    "load",
    "load_function",
    "mask_secrets",
    "read_overrides",
    "to_builtins",
    "to_toml",
]
