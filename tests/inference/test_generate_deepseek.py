"""Generation with latent attention: its cache, and routers' biases of a published model."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from inference.test_generate import generator, greedy
from outside.test_deepseek import made_by_transformers


@pytest.mark.parametrize("name", ["v3", "v32", "glm5", "glm52"])
@pytest.mark.parametrize("overrides", ["", pytest.param("parallel.tp=2", marks=pytest.mark.slow)])
def test_greedy_tokens_are_those_of_transformers(tmp_path, name, overrides):
    """The second caches its indexer's keys, too, and has longer prompts than keys to choose."""
    theirs = made_by_transformers(name)
    theirs.save_pretrained(tmp_path)
    prompts = [np.random.default_rng(0).integers(0, 96, n).tolist() for n in (21, 3)]
    made = generator(tmp_path, *overrides.split()).generate(prompts, 16, lambda *_: False)
    assert [one.tokens for one in made] == [greedy(theirs, prompt, 16) for prompt in prompts]
