"""What of `tokenizer_config.json` changes ids: fields by name, and classes of transformers.

A field is understood, harmless or refused. Some classes of transformers 5 build their own steps
from the vocabulary of `tokenizer.json` instead of reading its normalizer and pre-tokenizer; files
whose steps are others are refused, because other programs follow the file.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxpipe.config import ConfigError
from jaxpipe.tokenizer.files import CONFIG, SPECIAL_TOKENS, TOKENIZER, TokenizerFiles

_UNDERSTOOD = {
    "added_tokens_decoder", "additional_special_tokens", "extra_special_tokens", "chat_template",
    "split_special_tokens", "tokenizer_class", "add_prefix_space", "legacy",
}  # fmt: skip
# Of text that is decoded, padded, cut off or paired, of other software, or read from no file.
_HARMLESS = {
    "add_bos_token", "add_eos_token",  # the post-processor of tokenizer.json decides
    "backend", "bos_token_id", "chat_control_tokens", "clean_up_tokenization_spaces",
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", "device_map",
    "eos_token_id", "errors", "files_loaded", "is_local", "local_files_only", "max_len",
    "max_length", "max_model_input_sizes", "merges_file", "model_input_names", "model_max_length",
    "model_type", "name_or_path", "pad_to_multiple_of", "pad_token_id", "pad_token_type_id",
    "padding", "padding_side", "processor_class", "response_schema", "response_template",
    "return_token_type_ids", "spaces_between_special_tokens", "special_tokens_map_file", "stride",
    "tokenizer_file", "torch_dtype", "transformers_version", "trim_offsets", "truncation",
    "truncation_side", "truncation_strategy", "unk_token_id", "use_default_system_prompt",
    "use_fast", "verbose", "vocab_file", "vocab_size", "_commit_hash",
}  # fmt: skip
_PARTS = {
    "version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
    "post_processor", "decoder", "model",
}  # fmt: skip
_FROM_FILE = ("", "PreTrainedTokenizer", "TokenizersBackend", "PythonBackend")
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Steps(NamedTuple):
    """The steps that a class builds, as tokenizer.json writes them, and its special tokens.

    An entry `add_prefix_space` or `prepend_scheme` of None is that of the configuration.
    """

    tokens: Mapping[str, str]
    normalizer: Mapping[str, Any] | None
    pre_tokenizer: Mapping[str, Any]
    model: Mapping[str, bool]  # of BPE


_END = "<|endoftext|>"
_BYTES = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
_PIECES = {"fuse_unk": True, "byte_fallback": True, "ignore_merges": False}
_REBUILT = {
    "LlamaTokenizer": _Steps(
        {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
        None,
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": None, "split": False},
        _PIECES,
    ),
    "GemmaTokenizer": _Steps(
        {"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>",
         "mask_token": "<mask>"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
         "invert": False},
        _PIECES,
    ),
    "GPT2Tokenizer": _Steps(
        {"unk_token": _END, "bos_token": _END, "eos_token": _END},
        None,
        {"type": "ByteLevel", "add_prefix_space": None, "use_regex": True},
        _BYTES,
    ),
    "Qwen2Tokenizer": _Steps(
        {"unk_token": _END, "eos_token": _END, "pad_token": _END},
        {"type": "NFC"},
        {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": _QWEN}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": None, "use_regex": False},
        ]},
        _BYTES,
    ),
}  # fmt: skip


def is_rebuilt(files: TokenizerFiles) -> bool:
    """Whether transformers builds the steps of this tokenizer by its class."""
    return _class_of(files) in _REBUILT


def default_tokens(files: TokenizerFiles) -> Mapping[str, str]:
    """Return the special tokens that the tokenizer's class has by itself, by name."""
    name = _class_of(files)
    return _REBUILT[name].tokens if name in _REBUILT else {}


def check_fields(files: TokenizerFiles) -> None:
    """Raise `ConfigError` for a setting that changes ids and is not understood, by its name."""
    config, whole = files.json(CONFIG), files.json(TOKENIZER)
    place = f"of the tokenizer {files.place}"
    for name, fields, known in (
        (CONFIG, config, _UNDERSTOOD | _HARMLESS),
        (SPECIAL_TOKENS, files.json(SPECIAL_TOKENS), _UNDERSTOOD),
        (TOKENIZER, whole, _PARTS),
    ):
        for field, value in fields.items():
            is_name = field.endswith("_token") and (value is None or type(value) in (str, dict))
            if field not in known and not (is_name and name != TOKENIZER) and value:
                raise ConfigError(
                    f"{name} {place} has {field}={str(value)[:60]}, which may change ids and is "
                    f"not understood: take it out if it does not, or save the tokenizer again with "
                    f"`save_pretrained` of transformers."
                )
    model = whole.get("model") or {}
    if isinstance(model, dict) and model.get("dropout"):
        raise ConfigError(
            f"{TOKENIZER} {place} has model.dropout={model['dropout']}, by which the same text "
            f"gets other ids each time: set it to null."
        )
    name = _class_of(files)
    if name not in (*_FROM_FILE, *_REBUILT):
        raise ConfigError(
            f"{CONFIG} {place} has tokenizer_class={config['tokenizer_class']}, which may read "
            f"other files than {TOKENIZER}: set it to PreTrainedTokenizerFast, by which "
            f"{TOKENIZER} alone decides, if that gives the ids that the model knows."
        )
    _check_prefix(files, config, whole)
    if name in _REBUILT:
        _check_steps(files, name, config, whole)


def _class_of(files: TokenizerFiles) -> str:
    """Return the class of a tokenizer without `Fast`; "" where tokenizer.json alone decides."""
    name = files.json(CONFIG).get("tokenizer_class") or ""
    if not isinstance(name, str):
        raise ConfigError(f"{CONFIG} of {files.place}: tokenizer_class={name} is no name.")
    name = name.removesuffix("Fast")
    is_byte_level = any(
        step.get("type") == "ByteLevel" for step in _steps_of(files.json(TOKENIZER))
    )
    return "" if name == "LlamaTokenizer" and is_byte_level else name


def _steps_of(whole: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the normalizers and pre-tokenizers of tokenizer.json, without sequences."""
    steps, found = [whole.get("normalizer"), whole.get("pre_tokenizer")], []
    for step in steps:
        if isinstance(step, dict):
            inner = step.get("normalizers") or step.get("pretokenizers")
            if isinstance(inner, list):
                steps.extend(inner)
            else:
                found.append(step)
    return found


def _check_prefix(
    files: TokenizerFiles, config: Mapping[str, Any], whole: Mapping[str, Any]
) -> None:
    """Raise `ConfigError` where the files disagree about a blank before a text."""
    asked = config.get("add_prefix_space")
    does = []
    for step in _steps_of(whole):
        if step.get("type") == "Prepend":
            does.append(True)
        elif step.get("type") == "Metaspace":
            does.append(step.get("prepend_scheme", "always") != "never")
        elif "add_prefix_space" in step:
            does.append(bool(step["add_prefix_space"]))
    if asked is not None and does and bool(asked) != any(does):
        raise ConfigError(
            f"the files of the tokenizer {files.place} disagree: {CONFIG} has add_prefix_space="
            f"{str(asked).lower()}, but {TOKENIZER} {'adds one' if any(does) else 'adds none'}: "
            f"correct one of them."
        )


def _check_steps(
    files: TokenizerFiles, name: str, config: Mapping[str, Any], whole: Mapping[str, Any]
) -> None:
    """Raise `ConfigError` where tokenizer.json has other steps than the class builds."""
    steps = _REBUILT[name]
    asked, legacy = config.get("add_prefix_space"), config.get("legacy", False)
    is_llama = steps.pre_tokenizer["type"] == "Metaspace"
    scheme = "never" if asked is False else "always" if legacy else "first"
    given = {"add_prefix_space": bool(asked), "prepend_scheme": scheme}
    model = whole.get("model") or {}
    flags = {flag: model.get(flag) or False for flag in steps.model}
    wrong = {
        "normalizer": not _is_same(whole.get("normalizer"), steps.normalizer, given),
        "pre_tokenizer": not _is_same(whole.get("pre_tokenizer"), steps.pre_tokenizer, given),
        "model": flags != steps.model or model.get("type", "BPE") != "BPE",
    }
    if any(wrong.values()):
        part = next(name for name, is_wrong in wrong.items() if is_wrong)
        because = f" with legacy={str(bool(legacy)).lower()}" if is_llama else ""
        folder = ", in a folder without config.json" * (name == "Qwen2Tokenizer")
        raise ConfigError(
            f"the files of the tokenizer {files.place} disagree: transformers 5 builds another "
            f"{part} for tokenizer_class={config['tokenizer_class']}{because} than {TOKENIZER} "
            f"has, which other programs follow: set tokenizer_class to PreTrainedTokenizerFast, by "
            f"which {TOKENIZER} alone decides{folder}."
        )


def _is_same(found: Any, wanted: Any, given: Mapping[str, Any]) -> bool:
    """Whether a step of tokenizer.json is that of a class, offsets aside."""
    if isinstance(wanted, list):
        return (
            isinstance(found, list)
            and len(found) == len(wanted)
            and all(_is_same(*pair, given) for pair in zip(found, wanted))
        )
    if not isinstance(wanted, dict) or not isinstance(found, dict):
        return found == wanted
    wanted = {key: given.get(key) if value is None else value for key, value in wanted.items()}
    found = {"use_regex": True} | found if "use_regex" in wanted else found
    return found.keys() - {"trim_offsets"} == wanted.keys() and all(
        _is_same(found[key], value, given) for key, value in wanted.items()
    )
