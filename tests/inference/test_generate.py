"""Generated text: transformers' own greedy tokens, draws from the nucleus, and where it stops."""

import json
import re
import shutil
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from saved_runs import saved_run  # noqa: E402
from several import ends, start_all  # noqa: E402
from trained_models import MODELS, published  # noqa: E402

from jaxpipe.checkpoint.__main__ import main as checkpoint_command  # noqa: E402
from jaxpipe.checkpoint.hf.serving import ServingFiles  # noqa: E402
from jaxpipe.config import ConfigError  # noqa: E402
from jaxpipe.generate import main  # noqa: E402
from jaxpipe.inference.generation import Generator  # noqa: E402
from jaxpipe.inference.loaded_model import LoadedModel  # noqa: E402
from jaxpipe.inference.sampling import GREEDY, Sampling, key_of  # noqa: E402
from jaxpipe.inference.saved_model import SavedModel  # noqa: E402
from jaxpipe.inference.settings import inference_config  # noqa: E402
from jaxpipe.inference.text import chat_prompt  # noqa: E402

BYTES = ("--prompt", "def ", "--max-tokens", "12", "--tokenizer", "bytes")


def generator(directory, *overrides, sampling=GREEDY):
    saved = SavedModel.open(directory)
    config = inference_config(saved.model, overrides, rows=1, longest=40)
    return Generator(LoadedModel.load(saved, config), sampling)


def greedy(theirs, prompt, tokens):
    """Return the tokens that transformers adds, without stopping."""
    ids = torch.tensor([prompt])
    made = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return made[0, len(prompt) :].tolist()


@pytest.mark.slow(unless=["gpt2-*tp*"])
@pytest.mark.parametrize("overrides", ["", "parallel.tp=2"])
# With longrope transformers changes the factors of wavelengths while a text grows.
@pytest.mark.parametrize("name", [name for name in MODELS if "longrope" not in name])
def test_greedy_tokens_are_those_of_transformers(name, overrides):
    """Of prompts of differing lengths, one of them read in slices."""
    theirs, directory = published(name)
    longest = SavedModel.open(directory).longest
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 96, length).tolist() for length in (61, 50, 1)]
    prompts = [prompt[: max(longest - 64, 20)] for prompt in prompts]
    tokens = min(64, longest - max(map(len, prompts)))
    made = generator(directory, *overrides.split()).generate(prompts, tokens, lambda *_: False)
    for prompt, found in zip(prompts, made, strict=True):
        assert found.tokens == greedy(theirs, prompt, tokens)


PIPELINES = {
    "gpt2": "parallel.pp=3 parallel.schedule=zb_h1",
    "qwen3_tied": "parallel.pp=2 parallel.tp=2 parallel.vocab_parallel_pp=true",
    "qwen3_moe": "parallel.pp=2 parallel.dp=2 parallel.ep=2 parallel.zero_stage=3",
    "mistral": "parallel.dp=2 parallel.cp=2 parallel.tp=2 parallel.sequence_parallel=true",
    "qwen2": "parallel.pp=2 parallel.slices=2 parallel.schedule=1f1b",
}


@pytest.mark.extended
@pytest.mark.slow(unless=["qwen3_tied"])
@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_write_what_one_device_does(name):
    """Without a cache; the prompts' lengths differ, and there are more of them than in a batch."""
    directory, overrides = published(name)[1], PIPELINES[name].split()
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 96, length).tolist() for length in (3, 1, 9, 5, 2, 4, 7, 6, 8)]
    one = generator(directory).generate(prompts, 6)
    many = generator(directory, *overrides, "train.length_bucket=16")
    assert many.loaded.trainer.samples_per_step < len(prompts)
    assert_same(many.generate(prompts, 6), one)
    drawn = Sampling(1.0, 0.9)
    one = generator(directory, sampling=drawn).generate(prompts[:2], [4, 3], seed=3)
    assert [len(made.tokens) for made in one] == [4, 3]
    assert_same(Generator(many.loaded, drawn).generate(prompts[:2], [4, 3], seed=3), one)


def assert_same(found, want):
    assert [one.tokens for one in found] == [one.tokens for one in want]
    for one, other in zip(found, want):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_two_processes_write_what_one_does(tmp_path, capsys):
    saved_run(tmp_path / "run", "data.source=stdlib", "optimizer.lr=0.1", steps=6)
    words = [str(tmp_path / "run"), *BYTES]
    assert main(words) == 0
    text = capsys.readouterr().out.strip()
    command = [sys.executable, "-m", "jaxpipe.generate", *words, "runtime.cpu_devices=1"]
    (first, shown), (other, nothing) = ends(start_all(2, [*command, "parallel.pp=2"]))
    assert (first, other) == (0, 0), shown + nothing
    assert text in re.sub(r"\[Gloo\].*\n", "", shown)
    assert "def " not in nothing


def test_the_nucleus_is_that_of_transformers():
    logits = np.random.default_rng(0).normal(size=(5, 40)).astype(np.float32) * 3
    for temperature, top_p in ((0.5, 0.9), (1.0, 0.3), (2.0, 1.0), (1.0, 1e-6)):
        ours = Sampling(temperature, top_p).allowed(jnp.asarray(logits))
        theirs = torch.from_numpy(logits) / temperature
        if top_p < 1:
            theirs = transformers.TopPLogitsWarper(top_p)(None, theirs)
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6)


def test_draws_have_the_probabilities_of_the_logits_and_depend_on_the_seed():
    probabilities = np.array([0.5, 0.25, 0.2, 0.05], np.float32)
    logits = jnp.broadcast_to(jnp.log(probabilities), (20_000, 4))
    drawn = Sampling(1.0, top_p=0.9).draw(logits, key_of(0), jnp.int32(3))
    draws = np.asarray(drawn.token_B)
    np.testing.assert_allclose(np.exp(drawn.logprob_B), probabilities[draws], rtol=1e-5)
    shares = np.bincount(draws, minlength=4) / len(draws)
    np.testing.assert_allclose(shares, [0.5 / 0.95, 0.25 / 0.95, 0.2 / 0.95, 0], atol=0.015)
    for seed, place in ((1, 3), (0, 4)):
        other = Sampling(1.0, 0.9).draw(logits, key_of(seed), jnp.int32(place))
        assert (np.asarray(other.token_B) != draws).any()


@pytest.mark.extended
def test_a_run_speaks_and_its_export_says_the_same(tmp_path, capsys):
    """Bytes; any eos of a list ends the text, and what transformers generates is the same."""
    saved_run(tmp_path / "run", "data.source=stdlib", "optimizer.lr=0.1", steps=8)
    words = [str(tmp_path / "run"), *BYTES]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert text.startswith("def ")
    assert len(text) > len("def \n")

    checkpoint = str(tmp_path / "run" / "checkpoints" / "8")
    out = tmp_path / "out"
    assert checkpoint_command(["export", checkpoint, str(out)]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    made = greedy(theirs, list(b"def "), 12)
    assert text == bytes([*b"def ", *made]).decode(errors="replace") + "\n"

    stop = made[3]
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": [255, stop]}))
    capsys.readouterr()
    assert main([str(out), *words[1:]]) == 0
    first = made.index(stop)
    expected = bytes([*b"def ", *made[:first]]).decode(errors="replace")
    assert capsys.readouterr().out == expected + "\n"


def test_a_chat_model_replies_as_in_transformers(tmp_path, capsys):
    """Only the reply is printed; the tokenizer adds no second start to that of the template."""
    theirs, directory = published("mistral")
    shutil.copytree(directory, folder := tmp_path / "model")
    words = {"<s>": 0} | {chr(number): number for number in range(1, 96)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=" "))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    made.add_special_tokens(["<s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        "<s> $0", special_tokens=[("<s>", 0)]
    )
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
    )
    library = transformers.AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "HOW"}]
    ids = library.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert ids == [0, *b"[HOW]"]
    assert main([str(folder), "--chat", "--prompt", "HOW", "--max-tokens", "9"]) == 0
    reply = library.decode(greedy(theirs, ids, 9), skip_special_tokens=True)
    assert capsys.readouterr().out == reply + "\n"

    (folder / "chat_template.jinja").write_text("{{ raise_exception('a system message first') }}")
    assert main([str(folder), "--chat", "--prompt", "HOW"]) == 2
    assert "(a system message first): leave out --chat." in capsys.readouterr().err
    (folder / "chat_template.jinja").unlink()
    assert main([str(folder), "--chat", "--prompt", "HOW"]) == 2
    assert f"{folder} has no chat template: give --tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--prompt", "x"], "has no tokenizer.json: give --tokenizer"),
        (["--prompt", "", "--tokenizer", "bytes"], "the prompt has no token"),
        (["--prompt", "x", "--tokenizer", "bytes"], "gives the id 120, but model.vocab_size=96"),
        (["--prompt", "!" * 64, "--tokenizer", "bytes"], "the prompt has 64 tokens"),
        (["--prompt", "!", "--top-p", "0"], "--top-p 0.0: give a share"),
        (["--prompt", "!", "--top-p", "0.9"], "--top-p 0.9 with --temperature 0, which takes the"),
        (["--prompt", "!", "--temperature", "nan"], "--temperature nan: give 0, or a number from"),
        (["--prompt", "!", "--temperature", "1e-40"], "give 0, or a number from 1e-06 to 1e+06."),
        (["--prompt", "!", "--seed", "9" * 20], "--seed 99999999999999999999: give an integer of"),
    ],
)
def test_refusals(capsys, words, sentence):
    assert main([str(published("gpt2")[1]), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert sentence in error


def test_a_model_without_a_tokenizer_has_no_chat_template():
    saved = SimpleNamespace(serving=ServingFiles(), place="runs/x")
    with pytest.raises(ConfigError, match="runs/x has no chat template: give --tokenizer a dir"):
        chat_prompt(saved, "hello")


def test_prompts_of_other_lengths_need_no_further_programs():
    made = generator(published("mistral")[1])
    for length in (40, 33, 47):  # read in a slice of 32 tokens, and the others one by one
        made.generate([[1] * length], 2, lambda *_: False)
    programs = made.cached_model(64)
    assert (programs.read._cache_size(), programs.next._cache_size()) == (1, 1)
