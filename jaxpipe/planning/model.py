"""The model of a configuration, as its devices share it. Importing this imports jax."""

from jaxpipe.config import Config
from jaxpipe.model import FAMILIES
from jaxpipe.model.family import Model
from jaxpipe.model.fp8 import Fp8
from jaxpipe.parallel import (
    ExpertParallel,
    SequenceDataParallel,
    TensorParallel,
    VocabularyParallel,
)
from jaxpipe.partition.devices import ONE_DEVICE
from jaxpipe.partition.sequence import WHOLE_SEQUENCE


def model_of(config: Config) -> Model:
    """Devices along tp share its layers, those along pp too its ends, along ep its experts."""
    parallel = config.parallel
    devices = ONE_DEVICE
    if parallel.tp > 1:
        devices = TensorParallel(parallel.tp, parallel.sequence_parallel)
    ends = VocabularyParallel.of(devices, parallel.pp) if parallel.ends_shared_by else None
    more = {"documents": config.data.documents} if config.data.documents else {}
    if parallel.ep > 1:
        more["replicas"] = ExpertParallel(parallel.ep, parallel.ep_buffer_factor)
    if config.train.fp8 != "none":
        delayed = config.train.fp8 == "delayed"
        more["precision"] = Fp8(config.train.fp8_history if delayed else 0)
    return FAMILIES[config.model.family].build(
        config.model,
        devices=devices,
        end_devices=ends,
        sequence=SequenceDataParallel(parallel.sdp) if parallel.sdp > 1 else WHOLE_SEQUENCE,
        slices=parallel.slices,
        loss_chunks=config.train.loss_chunks,
        seed=config.train.seed,
        z_loss=config.train.z_loss,
        **more,
    )
