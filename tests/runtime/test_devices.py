"""What a command says of devices that it looks for and does not find."""

import logging

from jaxpipe.runtime.devices import check_devices


def test_a_plug_in_for_gpus_that_are_absent_is_one_line(caplog):
    check_devices()
    logger = logging.getLogger("jax._src.xla_bridge")
    try:
        raise RuntimeError("operation cuInit(0) failed\nand more")
    except RuntimeError:
        logger.exception("plug-in %s", "cuda")
    assert caplog.messages == ["plug-in cuda: operation cuInit(0) failed"]
    assert "Traceback" not in caplog.text
