"""What a command says of devices that it looks for and does not find."""

import logging

from commands import SMALL

from jaxpipe.runtime.devices import check_devices
from jaxpipe.train import main as train


def test_a_plug_in_for_gpus_that_are_absent_is_one_line(caplog):
    check_devices()
    logger = logging.getLogger("jax._src.xla_bridge")
    try:
        raise RuntimeError("operation cuInit(0) failed\nand more")
    except RuntimeError:
        logger.exception("plug-in %s", "cuda")
    assert caplog.messages == ["plug-in cuda: operation cuInit(0) failed"]
    assert "Traceback" not in caplog.text


def test_fused_attention_without_a_gpu_is_one_sentence(tmp_path, capsys):
    assert train([str(SMALL), f"run.dir={tmp_path}", "model.attention=cudnn"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: model.attention='cudnn' needs an NVIDIA GPU and cuDNN")
    assert error.count("\n") == 1
    assert not any(tmp_path.iterdir())
