"""Every command of the pages runs, with small models and short trainings, in a page's order."""

import importlib
import json
import re
import shlex
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from commands import start
from hf_models import LLAMA, random_tensors, write_model
from msgspec.structs import replace
from test_readme import HOME, PAGES, commands, module_and_words, name
from tokenizer_folders import N, folder

from jaxpipe import config as configs
from jaxpipe.lab.verification.shrinking import shrink

# Commands that other tests run, as patterns: they need a cluster, a package or a network.
ELSEWHERE = {
    r"launch/(test|gpu_report)\.sh": "launch/test_launch.py",
    r"^pip |-m (pip|venv) ": "launch/test_packages.py",
    r"local_multiprocess\.sh": "launch/test_local_multiprocess.py",
    r"^sbatch ": "launch/test_slurm.py",
    r"^kubectl ": "launch/test_kubernetes.py",
    r"--check-gpu ": "lab/gpu/test_check.py",
    r"runtime\.programs=": "runtime/test_saved_programs.py",
    r"jaxpipe\.evaluate ": "inference/test_evaluate.py",
    r"evaluate_tasks": "inference/test_run_tasks.py",
    r"grpo_example ": "inference/test_grpo_example.py",
    r"runs/(tokens|tuned)": "test_readme.py",
}
# Options by command, which end in a run of seconds.
SHORT = {
    command: options.split()
    for command, options in {
        "train": "train.eval_every=0 optimizer.warmup_steps=0",
        "generate": "--max-tokens 3",
        "bench ops": "--layers 1 --repeats 1",
        "bench train": "--steps 1",
        "bench step": "--schedules gpipe --microbatches 2 --rounds 1 --patience 0 "
        "model.n_layers=2 model.d_model=64 model.d_ff=128 model.vocab_size=256 train.seq_len=64",
        "bench clockwork": "--schedules 1f1b --ranks 2 --rounds 1 --steps 1 --seconds .01 .01 .01",
    }.items()
}
# For a configuration that `import` wrote: the devices of a test.
EIGHT = "train.seq_len=64 parallel.dp=8 parallel.zero_stage=0 runtime.cpu_devices=8"
SLOW = [
    "README.md", "jaxpipe/lab/bench/*", "jaxpipe/model/README.md", "jaxpipe/model/layers/moe/*",
    "jaxpipe/planning/*", "jaxpipe/lab/verification/*",
]  # fmt: skip
STANDS_FOR = {"HF_DIR": "models/llama", "PYTHON": sys.executable}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }} {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def jaxpipe_commands(page):
    """Return the module and arguments of each command of the page that no other test runs."""
    config = "configs/quickstart_moe.toml" if page.parent.name == "moe" else "own.toml"
    text, found = page.read_text().replace(" CONFIG", f" {config}"), []
    spans = re.findall(r"`(python -m jaxpipe\.[\w.]+ (?:-|[\w./]+ )[^`\n]+)`", text)
    for words in [*commands(text), *map(shlex.split, spans)]:
        if any(re.search(pattern, " ".join(words)) for pattern in ELSEWHERE):
            continue
        if (run := module_and_words(words)) is not None and run not in found:
            found.append(run)
        assert run or words[0] in ("git", "cd"), f"run it here or elsewhere: {' '.join(words)}"
    return found


def smaller(tree, path):
    """Write the smallest run with the settings of a recipe, on CPU devices; return its path."""
    full = configs.load(tree / path, [])
    config = shrink(full).config
    length = {"max_seq_len": 64} if getattr(config.model, "max_seq_len", 0) else {}
    source = "dummy" if full.data.path not in ("", "chats") else full.data.source
    config = replace(
        config,
        model=replace(config.model, vocab_size=256, **length),  # of bytes
        train=replace(config.train, seq_len=64),
        data=replace(config.data, source=source),
        checkpoint=full.checkpoint,
        runtime=replace(config.runtime, cpu_devices=config.parallel.devices),
    )
    path = path.replace("configs", "smaller")
    (tree / path).write_text(configs.to_toml(config))
    return path


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Enter a folder with all that commands read: recipes, a published model, and data."""
    monkeypatch.chdir(tree := tmp_path)
    for part in ("texts", "configs", "smaller", "runs", "models"):
        (tree / part).mkdir()
    for path in (HOME / "configs").glob("*.toml"):
        (tree / "configs" / path.name).symlink_to(path)
    (tree / "jaxpipe").symlink_to(HOME / "jaxpipe")
    model = replace(LLAMA, vocab_size=128)
    write_model(tree / "models/llama", model, random_tensors(model), max_position_embeddings=128)
    files = folder({"eos_token": "</s>", "chat_template": TEMPLATE})
    for file, content in files.items():
        (tree / "models/llama" / file).write_text(json.dumps(content))
    turns = [("user", "What is 12 times 12?"), ("assistant", "It is 144.")]
    messages = [{"role": role, "content": text} for role, text in turns]
    answers = {which: [messages[1] | {"content": which}] for which in ("chosen", "rejected")}
    rows = {
        "chats": {"messages": messages},
        "pairs": {"prompt": messages[:1], **answers},
        "more": {"text": "some text " * 9},
    }
    for file, row in rows.items():
        (tree / f"{file}.jsonl").write_text(400 * f"{json.dumps(row)}\n")
    zstandard = pytest.importorskip("zstandard")
    more = zstandard.compress((tree / "more.jsonl").read_bytes())
    (tree / "more.jsonl.zst").write_bytes(more)
    (tree / "texts/one.txt").write_text("one text " * 900)
    ids = np.random.default_rng(0).integers(0, N, (3, 17))
    np.save(tree / "tokens.npy", ids)
    (tree / "tokens.jsonl").write_text("".join(f"{row.tolist()}\n" for row in ids))
    return tree


def run(module, words, tree):
    """Run `python -m jaxpipe.<module>`, shortened, in this process if that has its devices.

    RUN_DIR stands for the newest run, and recipes for the smallest runs with their settings.
    """
    runs = sorted((tree / "runs").glob("*"), key=lambda path: path.stat().st_mtime)
    text = shlex.join(words).replace("RUN_DIR", f"runs/{runs[-1].name}" if runs else "RUN_DIR")
    text = re.sub(r"checkpoints/\d+", "checkpoints/2", text)
    words = [STANDS_FOR.get(word, word) for word in shlex.split(text)]
    if module == "train" and words[0].startswith("configs/"):
        words[0] = smaller(tree, words[0])
    if "own.toml" in words and module in ("train", "bench"):
        words += EIGHT.split() + ["data.source=dummy"] * ("data.path" not in text)
    plain = (module == "train" and words[0].startswith("--")) or "--print-config" in words
    more = [] if plain else SHORT.get(f"{module} {words[0]}", SHORT.get(module, []))
    words = [re.sub(r"(train.steps)=.*", r"\1=4", word) for word in words] + more
    if module == "train" and not plain and not any("train.steps" in word for word in words):
        words.append("train.steps=2")
    if module == "verify" or re.search(r"cpu_devices=[^8]", text):
        made = start([sys.executable, "-m", f"jaxpipe.{module}", *words], cwd=tree)
        output, _ = made.communicate()
        assert made.returncode == 0, f"{module} {shlex.join(words)}: {output}"
        return
    package = (HOME / "jaxpipe" / module / "__main__.py").exists()
    command = importlib.import_module(f"jaxpipe.{module}{'.__main__' * package}")
    try:
        code = command.main(words)
    except SystemExit as ended:
        code = ended.code
    assert not code, f"{module} {shlex.join(words)}"


@pytest.mark.extended(unless=["jaxpipe/*schedule*/*", "jaxpipe/checkpoint/*"])
@pytest.mark.slow(only=SLOW)
@pytest.mark.parametrize("page", [page for page in PAGES if jaxpipe_commands(page)], ids=name)
def test_commands_run(page, tree):
    listed, without = jaxpipe_commands(page), []
    text = shlex.join(word for _, words in listed for word in words)
    if "own.toml" in text and "--write-config" not in text:
        words = ["import", "HF_DIR", "--write-config", "own.toml", "--out", "base"]
        run("checkpoint", words, tree)
    if "data.path=tokens" in text and "prepare" not in text:
        run("data", ["prepare", "texts/", "--tokenizer", "models/llama", "--out", "tokens"], tree)
    if "runs/quickstart" in text or text == "--status RUN_DIR":
        run("train", ["configs/quickstart.toml", "run.dir=runs/quickstart"], tree)
    for module, words in listed:
        if "PYTHON" in words and not find_spec("torch"):
            without.append(shlex.join(["jaxpipe." + module, *words]))
        else:
            run(module, words, tree)
    if without:
        pytest.skip(f"torch is not installed, for {', '.join(without)}")


@pytest.mark.parametrize("file", ELSEWHERE.values())
def test_other_tests_of_commands_exist(file):
    assert (HOME / "tests" / file).is_file()
