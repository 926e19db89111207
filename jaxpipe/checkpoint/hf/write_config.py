"""Writes a run's TOML file for a Hugging Face checkpoint from its config.json."""

from pathlib import Path

import tomli_w

from jaxpipe.checkpoint.hf.parameters import model_settings, read_config
from jaxpipe.config import ConfigError

_SEQ_LEN = 2048  # tokens; less where the model's max_seq_len is smaller

_HEAD = """\
# A run that goes on training the model of {source}.
# [model] is that of its config.json; the other sections are a beginning: set them for your run.
# data.path: what `python -m jaxpipe.data prepare TEXT --tokenizer {source} --out FOLDER` wrote.

"""


def write_config(source: Path, target: Path) -> None:
    """Write a run's TOML file to `target` for the model that `source`/config.json describes.

    Raises `ConfigError` where no family has that model, or `target` exists or cannot be written.
    """
    model = model_settings(read_config(source), source)
    seq_len = min(model.get("max_seq_len", _SEQ_LEN), _SEQ_LEN)
    tree = {
        "model": model,
        "train": {"steps": 1000, "microbatch_size": 1, "grad_accum_steps": 8, "seq_len": seq_len},
        "optimizer": {"lr": 1e-5},
        "data": {"source": "file", "path": ""},
    }
    text = _HEAD.format(source=source) + tomli_w.dumps(tree)
    try:
        with target.open("x") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(
            f"{target} exists: give another file as --write-config, or give it as CONFIG."
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written ({error.strerror}): choose a file in a directory that "
            f"exists and is writable."
        ) from error
