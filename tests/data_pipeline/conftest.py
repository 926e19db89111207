"""Fixtures of the data tests."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from jaxpipe.data.prepare import preparation as preparing


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write pieces in this process: the same calls, but faster."""

    class Here:
        def __init__(self, count: int, work: Callable, jobs: Iterator[Any]):
            self.work, self.jobs = work, jobs

        def __enter__(self) -> Iterator[tuple[bool, Any]]:
            for job in self.jobs:
                reports: list[Any] = []
                result = self.work(job, reports.append)
                yield from ((False, report) for report in reports)
                yield True, result

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(preparing, "run_workers", Here)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model's directory with a tokenizer of few words."""
    folder = tmp_path_factory.mktemp("model")
    vocab = {"[UNK]": 0, "</s>": 1, "one": 2, "zwei": 3, "drei": 4, "five": 5, "[STOP]": 6}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        "</s> $A", special_tokens=[("</s>", 1)]
    )
    made.enable_truncation(3)
    made.enable_padding(length=9)
    made.save(str(folder / "tokenizer.json"))
    return folder
