"""Pairs of answers: from records to rows, and scored by the reference model to a run."""

from pathlib import Path

import numpy as np
import pytest
from commands import SMALL, metrics
from saved_runs import saved_run
from texts import lines, prepared

from jaxpipe.config import ConfigError, DataConfig
from jaxpipe.data.pairs import answers_of
from jaxpipe.data.prepare.records import RecordConverter
from jaxpipe.data.shards.token_files import open_documents
from jaxpipe.data.sources import open_data
from jaxpipe.model.loss import IGNORE
from jaxpipe.score import main as score
from jaxpipe.train import main as train

RECORDS = [
    {"prompt": f"{i} + {i} = ", "chosen": f"{2 * i}.", "rejected": f"{3 * i + 1}, or so"}
    for i in range(40)
]
USER, GOOD, BAD = (
    {"role": role, "content": text}
    for role, text in [("user", "hi"), ("assistant", "yo"), ("assistant", "no")]
)
pytestmark = pytest.mark.usefixtures("in_process")


def folder_of(tmp_path: Path, records: list, **options: object) -> Path:
    (tmp_path / "pairs.jsonl").write_bytes(lines(records))
    prepared([tmp_path / "pairs.jsonl"], tmp_path / "pairs", pairs=True, **options)
    return tmp_path / "pairs"


def beside(folder: Path, name: str = "reference") -> None:
    """Write values beside the tokens: the number of each token in its shard."""
    for shard in folder.glob("*.bin"):
        np.arange(shard.stat().st_size // 2, dtype="<f4").tofile(shard.with_suffix(f".{name}"))


def opened(folder: Path, **sizes: object):
    config = DataConfig(source="file", path=str(folder), heldout_fraction=0.3)
    return open_data(
        config, **{"seq_len": 24, "vocab_size": 256, "seed": 0} | sizes, directory=folder,
        answers=("reference",),
    )  # fmt: skip


def text_of(sample: dict) -> str:
    return bytes(sample["inputs"].astype("u1")).decode()


def test_a_record_becomes_two_documents_whose_answers_count(tmp_path):
    empty = {"prompt": "a", "chosen": "", "rejected": "b"}
    folder = folder_of(tmp_path, [*RECORDS, empty], eod="none")  # an empty answer teaches nothing
    documents = open_documents(str(folder), 256)
    assert len(documents.lengths) == 2 * len(RECORDS)
    for number, record in enumerate(RECORDS):
        for which, name in enumerate(("chosen", "rejected")):
            ids, counted = (
                getattr(documents, part)(2 * number + which) for part in ("tokens", "counted")
            )
            assert bytes(ids.astype("u1")).decode() == record["prompt"] + record[name]
            assert bytes(ids[counted].astype("u1")).decode() == record[name]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD], "score_chosen": 1.0},
        {"prompt": "hi", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ],
)
def test_conversations(record):
    found = RecordConverter(pairs=True).documents(record)
    begin = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    for passages, answer in zip(found, ("yo", "no"), strict=True):
        assert "".join(text for text, _ in passages) == f"{begin}{answer}<|im_end|>\n"
        assert [text for text, counts in passages if counts] == [f"{answer}<|im_end|>\n"]


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"prompt": "a", "chosen": "b"}, "it has no 'rejected', but 'prompt', 'chosen'"),
        ({"chosen": "a b", "rejected": "a c"}, "it has no 'prompt'"),
        ({"prompt": "x", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "its prompt is no"),
        ({"chosen": [USER, GOOD], "rejected": [GOOD, BAD]}, "begin with different messages"),
        (["a"], "it is no JSON object"),
    ],
)
def test_records_that_are_no_pair(record, sentence):
    with pytest.raises(ValueError, match=sentence):
        answers_of(record)


def test_a_pair_without_the_option_is_named():
    with pytest.raises(ValueError, match="it is a pair of answers, which --pairs reads"):
        RecordConverter().documents(RECORDS[0])


def test_rows_of_a_pair_stay_together(tmp_path):
    folder = folder_of(tmp_path, RECORDS)
    beside(folder)
    data = opened(folder)
    pairs = [(one["prompt"] + one["chosen"], one["prompt"] + one["rejected"]) for one in RECORDS]
    seen: list[tuple[str, ...]] = []
    sizes = {"microbatches": 1, "batch_size": 4, "length_of": lambda longest: 24}
    for split, most in ((data.train, len(data.train)), (data.heldout, len(data.heldout))):
        rows = [split._sample_at(place) for place in range(most)]
        seen += [tuple(map(text_of, both)) for both in zip(rows[::2], rows[1::2])]
        batch = split.batch(0, **sizes)
        assert batch["reference"].shape == batch["targets"].shape == (1, 4, 24)
        assert batch["reference"].dtype == np.float32
    assert sorted(seen) == sorted(pairs)  # no pair is divided between the splits
    assert seen != pairs
    documents = open_documents(str(folder), 256)  # one shard, whose values count its tokens
    ends = np.cumsum(documents.lengths)
    by_text = {bytes(documents.tokens(i).astype("u1")): end for i, end in enumerate(ends)}
    for place in range(len(data.train)):
        row = data.train._sample_at(place)
        ids = np.append(row["inputs"], row["targets"][-1]).astype("u1")
        end = by_text[bytes(ids)]
        np.testing.assert_array_equal(row["reference"], np.arange(end - len(ids) + 1, end))


def test_the_last_held_out_batch_is_filled_without_targets(tmp_path):
    folder = folder_of(tmp_path, RECORDS[:10])
    beside(folder)
    heldout = opened(folder).heldout
    size = len(heldout) + 2
    batch = heldout.batch(0, microbatches=1, batch_size=size, length_of=lambda longest: 24)
    np.testing.assert_array_equal(
        (batch["targets"] != IGNORE).any(-1)[0], np.arange(size) < len(heldout)
    )


def test_a_single_pair_is_not_divided(tmp_path):
    folder = folder_of(tmp_path, RECORDS[:1])
    with pytest.raises(ConfigError, match=r"heldout_fraction=0\.3 of .* its first 2 documents"):
        opened(folder)


def test_long_pairs_are_left_out_and_named(tmp_path):
    long = RECORDS[0] | {"rejected": "x" * 99}
    folder = folder_of(tmp_path, [long, *RECORDS])
    beside(folder)
    train = opened(folder).train
    assert "1 pairs of" in train.warnings[0]
    assert "x" * 9 not in "".join(text_of(train.samples[i]) for i in range(len(train.samples)))
    with pytest.raises(ConfigError, match="raise train.seq_len"):
        opened(folder, seq_len=3)


def test_refusals(tmp_path):
    folder = folder_of(tmp_path, RECORDS)
    with pytest.raises(ConfigError, match=r"000000.reference is missing: write it by `python -m"):
        opened(folder)
    (folder / "000000.reference").write_bytes(b"1234")
    with pytest.raises(ConfigError, match="has another size than its tokens"):
        opened(folder)
    config = DataConfig(source="file", path=str(folder))
    sizes = {"seq_len": 8, "vocab_size": 256, "seed": 0, "directory": folder}
    with pytest.raises(ConfigError, match="would teach the rejected ones too"):
        open_data(config, **sizes)
    np.save(folder.parent / "z.npy", np.zeros(99, "u1"))  # beside the folder of pairs
    with pytest.raises(
        ConfigError, match=r"also names .*z\.npy, no prepared folder: name the fold"
    ):
        open_data(
            DataConfig(source="file", path=str(folder.parent / "[pz]*[sy]")),
            **sizes,
            answers=("reference",),
        )
    (tmp_path / "text.jsonl").write_bytes(lines([{"text": "abc " * 30}]))
    prepared([tmp_path / "text.jsonl"], tmp_path / "text")
    config = DataConfig(source="file", path=str(tmp_path / "text"))
    with pytest.raises(ConfigError, match="is no folder that `python -m jaxpipe.data prepare"):
        open_data(config, **sizes, answers=("reference",))


@pytest.mark.extended
def test_from_records_to_a_run_that_prefers_the_chosen_answers(tmp_path, capsys):
    """The reference is the model that the run starts from, so its first loss is ln 2."""
    folder = folder_of(tmp_path, RECORDS)
    saved_run(tmp_path / "base", "data.source=dummy")
    assert score([str(tmp_path / "base"), str(folder), "train.length_bucket=32"]) == 0
    assert f"their log-probabilities are in {folder}" in capsys.readouterr().out
    run = [
        str(SMALL), f"run.dir={tmp_path}/run", "parallel.pp=2",
        "parallel.schedule=zb_h1", "model.n_layers=2", "train.steps=6", "train.eval_every=6",
        "train.grad_accum_steps=2", "train.microbatch_size=2", "train.loss=dpo",
        "optimizer.lr=3e-3", "optimizer.warmup_steps=0", "data.source=file", f"data.path={folder}",
        f"checkpoint.resume={tmp_path}/base", "checkpoint.parameters_only=true",
        "checkpoint.every=6", "runtime.compile_cache=",
    ]  # fmt: skip
    assert train([*run, "parallel.dp=4"]) == 0
    logged = list(metrics(tmp_path / "run").values())
    np.testing.assert_allclose(logged[0]["loss"], np.log(2), rtol=1e-5)
    assert logged[-1]["loss"] < 0.6
    assert logged[-1]["reward_accuracy"] > 0.8
    assert logged[-1]["reward_chosen"] > logged[-1]["reward_rejected"]
    assert np.isfinite(logged[-1]["eval_loss"])
