"""Tasks of lm-eval: the same numbers as from the harness's own model of transformers."""

import json
import sys
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of packages that the harness imports
    lm_eval = pytest.importorskip("lm_eval")
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    harness_tasks = pytest.importorskip("lm_eval.tasks")

from several import ends, start_all  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors  # noqa: E402

from jaxpipe.evaluate import main  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "then",
    "it",
    "ran",
    "to",
    "the",
    "red",
    "barn",
]
TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "writing": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{text}}"
generation_kwargs: {until: ["q"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a directory with a model of transformers, its tokenizer, and tasks."""
    folder = tmp_path_factory.mktemp("harness")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", 256)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder / "model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        **sizes, num_hidden_layers=2, vocab_size=258, max_position_embeddings=96,
        bos_token_id=256, eos_token_id=257, initializer_range=0.3,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    rng = np.random.default_rng(0)
    rows = [
        {
            "question": " ".join(rng.choice(WORDS, rng.integers(2, 9))) if i else "",
            "choices": [" " + " ".join(rng.choice(WORDS, rng.integers(1, 5))) for _ in range(4)],
            "answer": int(rng.integers(0, 4)),
            "text": " ".join(rng.choice(WORDS, 40)),  # longer than the model
        }
        for i in range(12)
    ]
    (folder / "rows.json").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name, text in TASKS.items():
        data = f"{{data_files: {{test: {folder}/rows.json}}}}"
        head = f"task: tiny_{name}\ntest_split: test\ndataset_path: json\ndataset_kwargs: {data}"
        (folder / f"{name}.yaml").write_text(head + text)
    return folder


def samples(results):
    """Return what the model answered to every example of every task, and the metrics."""
    answers = {
        name: [sample["filtered_resps"] for sample in made]
        for name, made in results["samples"].items()
    }
    numbers = {
        f"{task} {key}": value for task, found in results["results"].items()
        for key, value in found.items() if isinstance(value, float)
    }  # fmt: skip
    return answers, numbers


def test_the_harness_finds_the_numbers_of_its_own_model(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    tasks = [f"tiny_{name}" for name in TASKS]
    manager = harness_tasks.TaskManager(include_path=str(folder), include_defaults=False)
    theirs = huggingface.HFLM(str(folder / "model"), dtype="float32", device="cpu", batch_size=1)
    expected = lm_eval.simple_evaluate(theirs, tasks=tasks, task_manager=manager)

    out = tmp_path / "results.json"
    words = [str(folder / "model"), "--tasks", ",".join(tasks), "--include-path", str(folder)]
    assert main([*words, "--out", str(out), "train.length_bucket=96"]) == 0
    assert "tiny_choice" in capsys.readouterr().out
    answers, numbers = samples(json.loads(out.read_text()))
    their_answers, their_numbers = samples(json.loads(json.dumps(expected, default=str)))
    assert answers["tiny_writing"] == their_answers["tiny_writing"]
    assert len({text for (text,) in answers["tiny_writing"]}) > 3
    assert numbers.keys() == their_numbers.keys()
    for name, number in their_numbers.items():
        assert numbers[name] == pytest.approx(number, rel=1e-5), name
    for ours, others in zip(answers["tiny_choice"], their_answers["tiny_choice"], strict=True):
        for (logprob, greedy), (other, other_greedy) in zip(ours, others, strict=True):
            assert float(logprob) == pytest.approx(float(other), rel=1e-5, abs=1e-5)
            assert greedy == other_greedy


@pytest.mark.slow
def test_two_processes_find_what_one_does(folder, tmp_path):
    """Of scores and generated text, each process with one pipeline rank."""
    tasks = ",".join(f"tiny_{name}" for name in TASKS)
    words = [str(folder / "model"), "--tasks", tasks, "--include-path", str(folder)]
    found = {}
    for count, mesh in ((1, "parallel.pp=1"), (2, "parallel.pp=2"), (2, "parallel.tp=2")):
        out = tmp_path / f"{count}-{mesh}.json"
        command = [sys.executable, "-m", "jaxpipe.evaluate", *words, "--out", str(out)]
        more = ["--limit", "4", mesh, "runtime.cpu_devices=1"]
        places = {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_DATASETS_OFFLINE": "1"}
        made = ends(start_all(count, [*command, *more], places))
        assert [code for code, _ in made] == [0] * count, made
        assert ["|tiny_choice" in said for _, said in made] == [True, *[False] * (count - 1)]
        found[count, mesh] = samples(json.loads(out.read_text()))
    answers, numbers = found.pop((1, "parallel.pp=1"))
    for many, others in found.values():
        assert many["tiny_writing"] == answers["tiny_writing"]
        assert others == pytest.approx(numbers, rel=1e-5)


def test_an_unknown_task(folder, capsys):
    assert main([str(folder / "model"), "--tasks", "tiny_nothing"]) == 2
    assert "lm-eval has no task 'tiny_nothing'" in capsys.readouterr().err
