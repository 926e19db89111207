"""Rules of low-rank adapters."""

from jaxpipe.config import Config, ConfigError


def check_lora(config: Config) -> None:
    """Raise `ConfigError` if a model cannot have adapters, or not those adapters.

    `lora.rank` must be at most `model.d_model`.

    `lora.targets` may only name weights that the model's layers have.

    `lora.dropout` above 0 excludes adapters of experts, and of `wkv_b` with `parallel.slices` or
    `parallel.cp` above 1, unless replicas exchange heads (`parallel.cp_method='ulysses'`).

    `lora.targets` without `wk` and `wv` are needed where `model.n_kv_heads` is no multiple of
    `parallel.tp`.

    `model.router_bias_rate` must be 0.
    """
    rank, width = config.lora.rank, config.model.d_model
    if rank > width:
        raise ConfigError(
            f"lora.rank={rank} exceeds model.d_model={width}, and so the rank of every weight: "
            f"lower it."
        )
    if not rank:
        return
    if rate := getattr(config.model, "router_bias_rate", 0):
        raise ConfigError(
            f"model.router_bias_rate={rate} with lora.rank={rank}: adapters are those of a model "
            f"that stays as it is, and so do its routers' biases; set model.router_bias_rate=0 and "
            f"model.router_bias=true."
        )
    from jaxpipe.planning.model import model_of  # needs jax

    _ = model_of(config)
