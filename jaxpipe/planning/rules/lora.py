"""Rules of low-rank adapters."""

from jaxpipe.config import Config


def check_lora(config: Config) -> None:
    """Raise `ConfigError` if a model cannot have adapters, or not those adapters.

    `lora.targets` may only name weights that the model's layers have.

    `lora.dropout` above 0 excludes adapters of experts, and of `wkv_b` with `parallel.slices` or
    `parallel.cp` above 1, unless replicas exchange heads (`parallel.cp_method='ulysses'`).

    `lora.targets` without `wk` and `wv` are needed where `model.n_kv_heads` is no multiple of
    `parallel.tp`.
    """
    if not config.lora.rank:
        return
    from jaxpipe.planning.model import model_of  # needs jax

    _ = model_of(config)
