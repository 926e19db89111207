"""Builds the model of a configuration as its devices share it. Importing this imports jax."""

from functools import partial

import jax
import jax.numpy as jnp

from jaxpipe.config import Config, ConfigError
from jaxpipe.core.contract.devices import ONE_DEVICE
from jaxpipe.core.contract.experts import ALL_EXPERTS
from jaxpipe.core.contract.sequence import FULL_SEQUENCE
from jaxpipe.core.mesh import ContextParallel, ExpertParallel, TensorParallel, VocabularyParallel
from jaxpipe.model import FAMILIES
from jaxpipe.model.decoder import CausalDecoder
from jaxpipe.model.family import Model
from jaxpipe.model.layers.fp8 import PLAIN, Fp8
from jaxpipe.model.layers.lora import Adapters, LoraDecoder
from jaxpipe.model.layers.moe.layer import choose_dispatch
from jaxpipe.model.layers.moe.products import GroupedProduct, choose_grouped_product
from jaxpipe.model.options import Loss, Ops, Sharing
from jaxpipe.planning.objective import objective_of


def model_of(config: Config, grouped: GroupedProduct | None = None) -> Model:
    """Build the model as the devices of a configuration share it.

    `grouped` are the experts' grouped products; None: as a plan traces them.

    Layers are shared over tp, embedding and head also over pp if vocabulary-parallel, sequences
    over cp, and experts over ep, or ep and tp.
    """
    train = config.train
    grouped = grouped or grouped_of(config, None)
    precision = PLAIN
    if train.fp8 != "none":
        precision = Fp8(train.fp8_history if train.fp8 == "delayed" else 0, grouped.in_fp8)
    ops = Ops(
        precision,
        dispatch=partial(choose_dispatch, product=grouped.product),
        documents=config.data.documents,
        seed=train.seed,
    )
    loss = Loss(train.loss_chunks, train.z_loss, objective_of(config))
    family = FAMILIES[config.model.family]
    model = family.build(config.model, sharing=_sharing_of(config), ops=ops, loss=loss)
    return _with_adapters(model, config) if config.lora.rank else model


def _sharing_of(config: Config) -> Sharing:
    """How the devices of a mesh share a model."""
    parallel = config.parallel
    devices, sequence, replicas = ONE_DEVICE, FULL_SEQUENCE, ALL_EXPERTS
    if parallel.tp > 1:
        devices = TensorParallel(parallel.tp, parallel.sequence_parallel)
    shares_vocabulary = parallel.vocab_shared_by
    embed_head_devices = VocabularyParallel.of(devices, parallel.pp) if shares_vocabulary else None
    if parallel.cp > 1:
        sequence = ContextParallel(parallel.cp, parallel.exchanging)
    if parallel.ep > 1:
        replicas = ExpertParallel(
            parallel.ep, parallel.ep_buffer_factor, parallel.ep_over_tp,
            parallel.ep_per_host if parallel.ep_hosts > 1 else 1,
        )  # fmt: skip
    return Sharing(devices, embed_head_devices, sequence, config.layer_slices, replicas)


def _with_adapters(model: Model, config: Config) -> Model:
    """The model with adapters; raises `ConfigError` where it cannot have them."""
    lora = config.lora
    if not isinstance(model, CausalDecoder):
        raise ConfigError(
            f"lora.rank={lora.rank} is not for models of the family {config.model.family!r}: set "
            f"lora.rank=0, or choose another model.family."
        )
    try:
        return LoraDecoder(model, Adapters(lora.rank, lora.alpha, lora.targets, lora.dropout))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def grouped_of(config: Config, device: jax.Device | None) -> GroupedProduct:
    """Return the grouped products that devices of this kind use for experts."""
    dtype, fp8 = jnp.dtype(config.train.compute_dtype), config.train.fp8 != "none"
    tp = 1 if config.parallel.ep_over_tp else config.parallel.tp
    return choose_grouped_product(device, config.model, dtype, tp, fp8=fp8)
