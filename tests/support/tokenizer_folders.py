"""Small folders of tokenizers, written as Hugging Face's libraries write them.

`tests/data/tokenizer_ids.json` has the ids that transformers' `AutoTokenizer` gives for `TEXTS`;
`record` makes it.
"""

import json
from pathlib import Path

TEXTS = ["a<tool>b", "a <tool> b", "<x><tool></s>ab<x>", " a<tool>", "tool <x> b"]
RECORD = Path(__file__).parents[1] / "data" / "tokenizer_ids.json"
_FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")


def token(content, number=None, **flags):
    """Return an added token as files have it."""
    made = {"content": content, **{flag: flags.get(flag, False) for flag in _FLAGS}}
    return made if number is None else {"id": number} | made


def tokenizer_json(*added, **parts):
    """Return a byte-level BPE of ASCII and one merge, with `</s>` and further added tokens."""
    letters = [chr(byte) for byte in range(33, 127)] + ["Ġ", "ab", "</s>"]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    level |= {"use_regex": True}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "ignore_merges": False, "merges": [["a", "b"]],
        "vocab": {letter: number for number, letter in enumerate(letters)},
    }  # fmt: skip
    end = token("</s>", len(letters) - 1, special=True)
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [end, *added],
        "normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": model,
    } | parts  # fmt: skip


N = len(tokenizer_json()["model"]["vocab"])
_FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
_TRUNCATION = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
_PADDING = {
    "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
    "pad_type_id": 0, "pad_token": "!",
}  # fmt: skip


def folder(config=None, tokenizer=None, **files):
    """Return the files of a folder by name."""
    made = {"tokenizer": tokenizer or tokenizer_json(), "tokenizer_config": _FAST | (config or {})}
    return {f"{name}.json": fields for name, fields in (made | files).items()}


def _decoder(**flags):
    return folder({"added_tokens_decoder": {str(N): token("<tool>", **flags)}})


FOLDERS = {
    "tokenizer.json": folder(tokenizer=tokenizer_json(token("<tool>", N))),
    "added_tokens_decoder": _decoder(special=True),
    "lstrip": _decoder(lstrip=True),
    "rstrip": _decoder(rstrip=True, special=True),
    "single_word": _decoder(single_word=True),
    "normalized": _decoder(normalized=True),
    "two in order of their ids": folder(
        {"added_tokens_decoder": {str(N + 1): token("<tool>"), str(N): token("<x>")}}
    ),
    "added_tokens.json": folder(added_tokens={"<tool>": N}),
    "additional_special_tokens": folder({"additional_special_tokens": ["<tool>", "<x>"]}),
    "extra_special_tokens": folder({"extra_special_tokens": ["<x>", "<tool>"]}),
    "extra_special_tokens by name": folder({"extra_special_tokens": {"tool_token": "<tool>"}}),
    "a name of its own": folder({"image_token": "<tool>"}),
    "eos_token": folder({"eos_token": "<tool>", "pad_token": "<x>"}),
    "eos_token with flags": folder(
        {"eos_token": {"__type": "AddedToken"} | token("<tool>", lstrip=True, special=True)}
    ),
    "special_tokens_map.json": folder(
        special_tokens_map={"eos_token": "<x>", "additional_special_tokens": ["<tool>"]}
    ),
    "special_tokens_map.json over tokenizer_config.json": folder(
        {"eos_token": "</s>"}, special_tokens_map={"eos_token": "<tool>"}
    ),
    "other flags in two files": folder(
        {"added_tokens_decoder": {str(N): token("<tool>", lstrip=True)}},
        tokenizer_json(token("<tool>", N, special=True)),
    ),
    "split_special_tokens": folder(
        {"split_special_tokens": True, "additional_special_tokens": ["<tool>"]}
    ),
    "truncation and padding": folder(
        {"additional_special_tokens": ["<tool>"]},
        tokenizer_json(truncation=_TRUNCATION, padding=_PADDING),
    ),
    "GPT2Tokenizer": folder({"tokenizer_class": "GPT2Tokenizer"}),
    "the class of a model": folder({"tokenizer_class": None})
    | {"config.json": {"model_type": "gpt2"}},
    "a class in config.json": folder({"tokenizer_class": None})
    | {"config.json": {"model_type": "llama", "tokenizer_class": "GPT2Tokenizer"}},
    "a BOS that the configuration asks for and the file does not add": folder(
        {"bos_token": "<x>", "add_bos_token": True, "add_eos_token": True}
    ),
}
NOT_UNDERSTOOD = {  # what is wrong, and what the message names
    "another id": (
        folder({"added_tokens_decoder": {str(N + 5): token("<tool>")}}), f"'<tool>' has id {N + 5}"
    ),
    "an id that is taken": (folder(added_tokens={"<tool>": 3}), "'<tool>' has id 3"),
    "a token of a file that is not read": (
        folder({"added_tokens_decoder": {}}, added_tokens={"<tool>": N}), "'<tool>'"
    ),
    "a special token of a file that is not read": (
        folder({"added_tokens_decoder": {}}, special_tokens_map={"eos_token": "<tool>"}), "'<tool>'"
    ),
    "a token that a class drops": (
        folder(
            {"tokenizer_class": "GPT2TokenizerFast", "added_tokens_decoder": {}},
            tokenizer_json(token("<tool>", N)),
        ),
        "'</s>' is an added token of tokenizer.json, but not in added_tokens_decoder",
    ),
    "an unknown flag": (
        folder({"added_tokens_decoder": {str(N): token("<tool>") | {"stem": True}}}), "has stem"
    ),
    "an unknown field": (folder({"do_lower_case": True}), "do_lower_case=True"),
    "an unknown part": (folder(tokenizer=tokenizer_json(sampler={"p": 1})), "sampler={'p': 1}"),
    "an unknown special token": (
        folder(special_tokens_map={"end_tokens": ["<x>"]}), "end_tokens="
    ),
    "dropout": (
        folder(tokenizer=tokenizer_json(model=tokenizer_json()["model"] | {"dropout": 0.1})),
        "model.dropout=0.1",
    ),
    "sampling": (folder({"sp_model_kwargs": {"enable_sampling": True}}), "sp_model_kwargs="),
    "files of other versions": (
        folder({"fast_tokenizer_files": ["tokenizer.4.0.0.json"]}), "fast_tokenizer_files="
    ),
    "code of its own": (folder({"auto_map": {"AutoTokenizer": ["a.B", None]}}), "auto_map="),
    "a class without tokenizer.json": (
        folder({"tokenizer_class": "ByT5Tokenizer"}), "tokenizer_class=ByT5Tokenizer"
    ),
    "a class that splits otherwise": (
        folder({"tokenizer_class": "Qwen2Tokenizer"}), "another normalizer"
    ),
    "a class that a model forces": (
        folder() | {"config.json": {"model_type": "qwen2"}}, "in a folder without config.json"
    ),
    "a blank that one file adds": (
        folder({"add_prefix_space": True}), "add_prefix_space=true, but tokenizer.json adds none"
    ),
    "two lists": (
        folder({"additional_special_tokens": ["<x>"], "extra_special_tokens": ["<tool>"]}),
        "has both extra_special_tokens and additional_special_tokens",
    ),
    "too many brackets": (
        folder() | {"tokenizer_config.json": "[" * 200_000}, "is not a JSON object"
    ),
    "nested too deeply": (
        folder() | {"tokenizer_config.json": '{"a":' * 200_000}, "is not a JSON object"
    ),
}  # fmt: skip


def write(files, directory):
    """Write a folder, and return it; a text is written as it is."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, fields in files.items():
        text = fields if isinstance(fields, str) else json.dumps(fields)
        (directory / name).write_text(text, "utf-8")
    return directory


def record(directory):
    """Return the ids of `TEXTS` and the largest id plus one of every folder, by transformers."""
    import transformers

    made = {}
    for name, files in FOLDERS.items():
        place = write(files, directory / str(len(made)))
        library = transformers.AutoTokenizer.from_pretrained(place)
        ids = [library(text)["input_ids"] for text in TEXTS]
        made[name] = [max(library.get_vocab().values()) + 1, ids]
    return made
