"""Small models on disk that transformers wrote."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from checkpoint.test_huggingface_transformers import MODELS as PLAIN
from checkpoint.test_huggingface_transformers import logits_of, made_by_transformers
from outside import test_deepseek as deepseek

transformers = pytest.importorskip("transformers")
MODELS = (*PLAIN, *deepseek.MODELS)
VOCABULARY = 96  # of all of them
__all__ = ["MODELS", "VOCABULARY", "logits_of", "published"]


@cache
def published(name):
    """Return transformers' model of that name in `MODELS`, and a directory that holds it."""
    transformers.utils.logging.disable_progress_bar()
    directory = Path(mkdtemp()) / name
    if name in PLAIN:
        theirs = made_by_transformers(PLAIN[name])
    else:
        theirs = deepseek.made_by_transformers(name)
    theirs.save_pretrained(directory)
    return theirs, directory
