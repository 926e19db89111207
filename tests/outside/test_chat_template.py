"""Messages against transformers' own `apply_chat_template` with a ChatML template."""

import json
from pathlib import Path

import pytest
import tokenizers

from jaxpipe.data.records import RecordConverter
from jaxpipe.data.tokenizing import load_tokenizer

transformers = pytest.importorskip("transformers")

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' "
    "+ '\\n' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endif %}{% endfor %}"
)
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CONTENTS = ["hi", "\n yes\n\nno", " é 日本 🙂 ", "a <|im_end|> b", "1+1=2\n"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=MARKS,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator([*CONTENTS, "user\n\n", "assistant\n\n yes"] * 5, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


@pytest.mark.parametrize("content", CONTENTS)
def test_ids_and_mask_are_those_of_transformers(folder: Path, content: str) -> None:
    messages = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": content},
        {"role": "assistant", "content": content},
        {"role": "user", "content": "yes"},
        {"role": "assistant", "content": "no"},
    ]
    library = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = library.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    (ours,) = load_tokenizer(str(folder)).encode(
        [RecordConverter().passages({"messages": messages})]
    )
    assert ours.ids.tolist() == theirs["input_ids"]
    assert ours.counted.tolist() == [bool(flag) for flag in theirs["assistant_masks"]]
