"""jaxpipe: pipeline-parallel training of decoder language models in JAX."""

import signal
import sys
from importlib.util import find_spec

# `python -m` sets this while it looks for the command, before any of its imports.
if sys.argv[:1] == ["-m"]:
    if sys.version_info < (3, 11) or find_spec("msgspec") is None:
        sys.exit(
            "error: this Python lacks the packages of jaxpipe or is older than 3.11; use a script "
            "in launch/, such as ./launch/train.sh, or run `source .venv/bin/activate`, which they "
            "make"
        )
    # Ctrl-C during the command's imports ends the process, without a traceback. `command.run`
    # makes it an exception again.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
