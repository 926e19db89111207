"""Tasks of lm-eval within a run: the numbers that `python -m jaxpipe.evaluate` gives afterwards."""

import json
import sys

import numpy as np
import pytest
from commands import SMALL, metrics
from several import ends, start_all

from jaxpipe.checkpoint.listing import list_steps
from jaxpipe.config import ConfigError
from jaxpipe.inference.loaded_model import LoadedModel
from jaxpipe.inference.saved_model import SavedModel
from jaxpipe.inference.scoring import Scorer
from jaxpipe.inference.settings import inference_config
from jaxpipe.inference.tasks import Tasks
from jaxpipe.train import main
from jaxpipe.training import scores

# A harness with one task, `counting`, whose number is a sum of log-probabilities.
HARNESS = {
    "__init__.py": """
def simple_evaluate(model, tasks, task_manager, limit, bootstrap_iters):
    requests = [(None, list(b"def"), list(b"f(x)")), (None, list(b"a" * 50), list(b"=1"))][:limit]
    made = model._loglikelihood_tokens(requests)
    assert model._loglikelihood_tokens([(None, list(b"def"), [])]) == [(0.0, True)]
    total = sum(one for one, _ in made)
    found = {"alias": tasks[0], "logprob,none": total, "logprob_stderr,none": 1}
    return {"results": {tasks[0]: found}}
""",
    "tasks.py": """
class TaskManager:
    def __init__(self, include_path):
        self.all_tasks = ["counting"]
""",
    "api/__init__.py": "",
    "api/model.py": "class TemplateLM:\n    pass\n",
}
ROWS = [b"deff(x)", b"a" * 50 + b"=1"]
ASKED = (4, 2)  # last tokens of each whose log-probabilities count
RUN = (
    "parallel.pp=2", "parallel.dp=2", "runtime.cpu_devices=0", "parallel.schedule=zb_h1",
    "train.steps=4", "train.eval_every=0", "checkpoint.every=2", "train.evaluate_every=2",
    "train.evaluate_tokenizer=bytes", "runtime.compile_cache=",
)  # fmt: skip


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Put a package lm_eval of a few lines in the place of the harness."""
    for name, text in HARNESS.items():
        path = tmp_path / "packages" / "lm_eval" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    hidden = [name for name in sys.modules if name.split(".")[0] == "lm_eval"]
    with monkeypatch.context() as patch:
        for name in hidden:
            patch.delitem(sys.modules, name)
        patch.syspath_prepend(tmp_path / "packages")
        yield
        for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
            del sys.modules[name]


def on_four_devices(monkeypatch):
    import jax

    four = jax.devices()[:4]
    monkeypatch.setattr(jax, "devices", lambda *_: four)


@pytest.mark.extended
@pytest.mark.usefixtures("stand_in")
def test_a_run_logs_the_numbers_of_its_checkpoints(tmp_path, monkeypatch, capsys):
    on_four_devices(monkeypatch)
    words = [str(SMALL), f"run.dir={tmp_path}/run", *RUN, 'train.evaluate_tasks=["counting"]']
    compiled, build = [], scores.outputs_program
    monkeypatch.setattr(scores, "outputs_program", lambda *how: compiled.append(how) or build(*how))
    assert main(words) == 0
    assert len(compiled) == 1  # the second evaluation uses the programs of the first
    assert "tasks/counting/logprob" in capsys.readouterr().out
    logged = metrics(tmp_path / "run")
    assert [step for step, line in logged.items() if "tasks/counting/logprob" in line] == [2, 4]
    assert logged[4]["evaluate_seconds"] > 0
    for step in (2, 4):
        saved = SavedModel.open(tmp_path / "run" / "checkpoints" / str(step))
        config = inference_config(saved.model, ["parallel.tp=2"], rows=2, longest=64)
        rows = [np.frombuffer(row, np.uint8).astype(np.int32) for row in ROWS]
        scored = Scorer(LoadedModel.load(saved, config)).score(rows)
        want = sum(one.logprobs[-count:].sum() for one, count in zip(scored, ASKED, strict=True))
        np.testing.assert_allclose(logged[step]["tasks/counting/logprob"], want, rtol=1e-5)


@pytest.mark.extended
@pytest.mark.usefixtures("stand_in")
def test_a_step_is_saved_where_a_task_fails(tmp_path, monkeypatch, capsys):
    on_four_devices(monkeypatch)

    def fail(self, model, **_):
        raise ConfigError("no such metric.")

    monkeypatch.setattr(Tasks, "evaluate", fail)
    words = [str(SMALL), *RUN, "checkpoint.every=0", 'train.evaluate_tasks=["counting"]']
    assert main([*words, f"run.dir={tmp_path}/run"]) == 2
    assert "error: no such metric." in capsys.readouterr().err
    assert list_steps(tmp_path / "run" / "checkpoints") == [2]


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
def test_two_processes_log_what_one_does(tmp_path, monkeypatch):
    words = [str(SMALL), *RUN, 'train.evaluate_tasks=["counting"]']
    command = [sys.executable, "-m", "jaxpipe.train", *words, f"run.dir={tmp_path}/two"]
    paths = {"PYTHONPATH": f"{tmp_path}/packages:{SMALL.parents[2]}"}
    made = ends(start_all(2, [*command, "runtime.cpu_devices=2"], paths))
    assert [code for code, _ in made] == [0, 0], made
    on_four_devices(monkeypatch)
    assert main([*words, f"run.dir={tmp_path}/one"]) == 0
    one, two = (metrics(tmp_path / name)[4]["tasks/counting/logprob"] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-5)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (['train.evaluate_tasks=["nothing"]'], "lm-eval has no task 'nothing'"),
        (['train.evaluate_tasks=["counting"]', "train.evaluate_tokenizer="], "has no tokenizer"),
        ([], "needs train.evaluate_tasks, but"),
    ],
)
def test_refusals(tmp_path, monkeypatch, capsys, words, sentence):
    on_four_devices(monkeypatch)
    assert main([str(SMALL), f"run.dir={tmp_path}/run", *RUN, *words]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_a_task_of_the_harness(tmp_path, monkeypatch):
    """The run's number is that of `python -m jaxpipe.evaluate` on its last checkpoint."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install -e '.[eval]'")
    from jaxpipe.evaluate import main as evaluate

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    on_four_devices(monkeypatch)
    rows = [
        {"question": f"{i} is", "choices": [" odd", " even"], "answer": 1 - i % 2} for i in range(9)
    ]
    (tmp_path / "rows.json").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "parity.yaml").write_text(
        f"task: parity\ntest_split: test\ndataset_path: json\noutput_type: multiple_choice\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path}/rows.json}}}}\n"
        'doc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: "{{answer}}"\n'
        "metric_list: [{metric: acc}]\n"
    )
    words = [f"train.evaluate_include_path={tmp_path}", "train.evaluate_limit=7"]
    words = [str(SMALL), f"run.dir={tmp_path}/run", *RUN, 'train.evaluate_tasks=["parity"]', *words]
    assert main(words) == 0
    out = tmp_path / "out.json"
    words = [str(tmp_path / "run"), "--tasks", "parity", "--include-path", str(tmp_path)]
    words += ["--tokenizer", "bytes", "--limit", "7"]
    assert evaluate([*words, "--out", str(out)]) == 0
    found = json.loads(out.read_text())["results"]["parity"]["acc,none"]
    assert metrics(tmp_path / "run")[4]["tasks/parity/acc"] == pytest.approx(found)
