"""A trained model as one of lm-eval, the EleutherAI evaluation harness.

Numbers are those of the harness's own `hf` model (`lm_eval/models/huggingface.py`).
"""

import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxpipe.config import ConfigError
from jaxpipe.data.optional import import_optional
from jaxpipe.data.prepare.limits import bounded
from jaxpipe.inference.generation import Generator
from jaxpipe.inference.loaded_model import LoadedModel
from jaxpipe.inference.sampling import GREEDY, Sampling
from jaxpipe.inference.scoring import Scorer
from jaxpipe.inference.text import TextTokenizer

PURPOSE = "`python -m jaxpipe.evaluate`"
_BATCH = 8  # contexts that are continued together
_SECONDS = 10.0  # that a chat template may take for a conversation
_NEW_TOKENS = 256  # where a task sets no limit, as in the harness
_KNOWN = ("until", "max_gen_toks", "do_sample", "temperature", "top_p", "use_cache")
_OF_DRAWS = ("top_k", "min_p", "typical_p")  # which greedy text does not read
# Values with which settings of transformers' `generate` do nothing.
_NEUTRAL = {
    "top_k": 0, "num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0,
    "length_penalty": 1.0, "no_repeat_ngram_size": 0, "early_stopping": False,
}  # fmt: skip


class HarnessMethods:
    """The methods of `lm_eval.api.model.TemplateLM`, without that base class.

    Args:
      loaded: the model on its mesh, with what is on disk.
      tokenizer: its tokenizer.
      max_length: the longest sequence to read [tokens].
    """

    def __init__(self, loaded: LoadedModel, tokenizer: TextTokenizer, max_length: int):
        super().__init__()
        assert loaded.saved is not None
        self.loaded, self.text, self.max_length = loaded, tokenizer, max_length
        self.place, self.serving = loaded.saved.place, loaded.saved.serving
        self.scorer = Scorer(loaded)
        self._generators: dict[Sampling, Generator] = {}

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return (*self.serving.eos_token_ids, self.prefix_token_id)[0]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        token = self.serving.prefix_token_id
        if token is None:
            raise ConfigError(
                f"{self.place} has neither a BOS nor an EOS token, which stands for "
                f"an empty context in this task: export the model with --tokenizer DIR first."
            )
        return token

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the ids of a text, with special tokens unless it starts with one."""
        if add_special_tokens is None:
            token = self.serving.prefix_token_id
            prefix = "" if token is None else self.text.decode([token], special=True)
            add_special_tokens = not (prefix and string.startswith(prefix))
        return self.text.encode(string, special=add_special_tokens)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Return each continuation's log-probability, and whether it is the greedy one.

        Raises `ConfigError` where a continuation alone is longer than the model reads.
        """
        tokens = max((len(continuation) for _, _, continuation in requests), default=0)
        if tokens > self.max_length:
            raise ConfigError(
                f"a task asks for the probability of {tokens} tokens, but the model is made for "
                f"{self.max_length}: evaluate another task."
            )
        longest = self.max_length + 1  # the last token is a target alone
        rows = [
            np.array((context + continuation)[-longest:], np.int32)
            for _, context, continuation in requests
        ]
        results = []
        for request, one in zip(requests, self.scorer.score(rows)):
            first = max(0, len(one.greedy) - len(request[2]))
            logprob = float(one.logprobs[first:].sum(dtype="float64"))
            results.append((logprob, bool(one.greedy[first:].all())))
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """Return the log-probability of whole texts, in windows that do not overlap."""
        utils = import_optional("lm_eval.utils", PURPOSE, "eval")
        windows = [
            [
                (None, *utils.make_disjoint_window(window))
                for window in utils.get_rolling_token_windows(
                    token_list=self.tok_encode(request.args[0]),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            for request in requests
        ]
        scores = iter(self._loglikelihood_tokens([one for own in windows for one in own]))
        return [sum(next(scores)[0] for _ in own) for own in windows]

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """Return the continuation of each context, up to a stop sequence."""
        utils = import_optional("lm_eval.models.utils", PURPOSE, "eval")
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        texts_by_index: dict[int, str] = {}
        for numbers in groups.values():
            settings = utils.normalize_gen_kwargs(requests[numbers[0]].args[1], _NEW_TOKENS)
            contexts = {number: requests[number].args[0] for number in numbers}
            for begin in range(0, len(numbers), _BATCH):
                part = numbers[begin : begin + _BATCH]
                texts = self._continue([contexts[number] for number in part], settings)
                texts_by_index |= zip(part, texts)
        return [texts_by_index[number] for number in range(len(requests))]

    def _continue(self, contexts: list[str], settings: dict[str, Any]) -> list[str]:
        """Return continuations with the harness's settings, cut at the first stop sequence."""
        tokens, stops = settings["max_gen_toks"], [stop for stop in settings["until"] if stop]
        room = self.max_length - tokens
        if room < 1:
            raise ConfigError(
                f"a task generates up to {tokens} tokens, but the model is made for "
                f"{self.max_length}: evaluate another task."
            )
        prompts = [self.tok_encode(context)[-room:] for context in contexts]
        ends = self.serving.eos_token_ids

        def text_of(tokens: list[int]) -> str:
            return self.text.decode([token for token in tokens if token not in ends])

        def is_finished(_: int, tokens: list[int]) -> bool:
            return tokens[-1] in ends or any(stop in text_of(tokens) for stop in stops)

        sampling = sampling_of(settings)
        generator = self._generators.setdefault(sampling, Generator(self.loaded, sampling))
        made = generator.generate(prompts, tokens, is_finished)
        texts = [text_of(one.tokens) for one in made]
        return [
            min((text.split(stop)[0] for stop in stops), key=len, default=text) for text in texts
        ]

    def apply_chat_template(self, history: list[dict[str, str]], **options: Any) -> str:
        """Return the text of a conversation by the model's chat template."""
        with bounded(_SECONDS):
            return self._chat_tokenizer.apply_chat_template(
                history, tokenize=False, **({"add_generation_prompt": True} | options)
            )

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the model's chat template; "" if none is asked for."""
        return self._chat_tokenizer.chat_template or "" if chat_template else ""

    @property
    def tokenizer_name(self) -> str:
        """A name of the tokenizer, by which the harness keys what it caches."""
        return str(self.place).replace("/", "__")

    @cached_property
    def _chat_tokenizer(self) -> Any:
        """The tokenizer of transformers, which renders chat templates."""
        transformers = import_optional("transformers", "--apply-chat-template", "hf")
        if not self.serving.tokenizer.chat_templates:
            raise ConfigError(
                f"{self.place} has no chat template: give --tokenizer a directory "
                f"that has one, or leave out --apply-chat-template."
            )
        with tempfile.TemporaryDirectory() as directory:
            self.serving.write(Path(directory))
            return transformers.AutoTokenizer.from_pretrained(directory)


def sampling_of(settings: dict[str, Any]) -> Sampling:
    """How a task's text is generated, from its `generation_kwargs` as the harness normalises them.

    Raises `ConfigError` where a setting asks for more than a temperature and a nucleus.
    """
    samples = settings["do_sample"]
    for name, value in settings.items():
        if name in _KNOWN or (name in _OF_DRAWS and not samples):
            continue
        if name not in _NEUTRAL or value != _NEUTRAL[name]:
            raise ConfigError(
                f"a task generates with {name}={value!r}, which this model does not do: evaluate "
                f"another task, or take the setting out of its generation_kwargs."
            )
    if not samples:
        return GREEDY
    return Sampling(settings.get("temperature", 1.0), settings.get("top_p", 1.0))


def harness_model(loaded: LoadedModel, tokenizer: TextTokenizer, max_length: int) -> Any:
    """A model as `lm_eval.simple_evaluate` takes it; arguments as those of `HarnessMethods`.

    Raises `ConfigError` where lm-eval is not installed.
    """
    template: Any = import_optional("lm_eval.api.model", PURPOSE, "eval").TemplateLM

    class Model(HarnessMethods, template):
        """A trained model of jaxpipe."""

    return Model(loaded, tokenizer, max_length)
