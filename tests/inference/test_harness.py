"""What tasks of lm-eval ask for that a model here cannot do is refused, not left out."""

from types import SimpleNamespace

import pytest

from jaxpipe.config import ConfigError
from jaxpipe.evaluate import main
from jaxpipe.inference.harness import HarnessMethods, sampling_of
from jaxpipe.inference.sampling import GREEDY, Sampling

GREEDILY = {"until": ["x"], "max_gen_toks": 4, "do_sample": False, "temperature": 0.0}
DRAWN = GREEDILY | {"do_sample": True, "temperature": 0.7}


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        (GREEDILY, GREEDY),
        (GREEDILY | {"top_k": 5, "top_p": 0.5, "num_beams": 1}, GREEDY),
        (DRAWN | {"top_p": 0.5, "repetition_penalty": 1.0}, Sampling(0.7, 0.5)),
        ({"do_sample": True}, Sampling(1.0)),
    ],
)
def test_what_a_task_sets_is_done(settings, want):
    assert sampling_of(settings) == want


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (DRAWN | {"top_k": 5}, "top_k=5"),
        (GREEDILY | {"num_beams": 4}, "num_beams=4"),
        (GREEDILY | {"repetition_penalty": 1.5}, "repetition_penalty=1.5"),
        (GREEDILY | {"something": None}, "something=None"),
    ],
)
def test_what_a_task_sets_and_cannot_be_done_is_refused(settings, name):
    with pytest.raises(ConfigError, match=f"a task generates with {name}, which"):
        sampling_of(settings)


def test_a_continuation_longer_than_the_model_is_refused():
    model = SimpleNamespace(max_length=4, scorer=SimpleNamespace(score=lambda rows: []))
    assert HarnessMethods._loglikelihood_tokens(model, [(None, [1], [2] * 4)]) == []
    with pytest.raises(ConfigError, match="probability of 5 tokens, but the model is made for 4"):
        HarnessMethods._loglikelihood_tokens(model, [(None, [1], [2] * 5)])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tasks", ","], "--tasks ',': "),
        (["--tasks", "one", "--limit", "0"], "--limit 0: give 1"),
    ],
)
def test_no_task_and_no_example_are_refused(words, says, capsys):
    assert main(["nowhere", *words]) == 2
    assert says in capsys.readouterr().err
