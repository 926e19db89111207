"""Tables that `datasets` writes, against transformers' `apply_chat_template` on the rows."""

from pathlib import Path
from typing import Any

import pytest

from jaxpipe.data.prepare.chat_templates import ChatTemplate
from jaxpipe.data.prepare.input_pieces import divide_files, list_input_files
from jaxpipe.data.prepare.readers import find_format
from jaxpipe.data.prepare.records import RecordConverter

datasets = pytest.importorskip("datasets")
utils = pytest.importorskip("transformers.utils.chat_template_utils")

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}[{{ m.role }}]"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "{% endfor %}"
)


def row(name: str, **arguments: Any) -> dict[str, Any]:
    kinds = {key: {"type": type(value).__name__} for key, value in arguments.items()}
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    tool = {"name": name, "parameters": {"type": "object", "properties": kinds}}
    return {
        "messages": [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ],
        "tools": [{"type": "function", "function": tool}],
    }


ROWS = [row("weather", city="Paris"), row("search", query="x", k=3), row("time", at={"zone": "a"})]


def written(path: Path) -> list[str]:
    records = RecordConverter(writer=ChatTemplate({"default": TEMPLATE}, {}))
    parts = [p for piece in divide_files(list_input_files([path]).files, 1) for p in piece.parts]
    items = [load() for p in parts for load, _ in find_format(Path(p.path)).read(p, records)]
    return ["".join(text for text, _ in records.passages(item)) for item in items]


@pytest.mark.parametrize("form", ["parquet", "save_to_disk", "json"])
def test_tables_of_datasets_are_written_as_their_rows(tmp_path: Path, form: str) -> None:
    features = None
    if form == "json":
        if not hasattr(datasets, "Json"):
            pytest.skip("this version of datasets has no Json")
        names = ("messages", "tools")
        features = datasets.Features({name: datasets.List(datasets.Json()) for name in names})
    table = datasets.Dataset.from_list(ROWS, features=features)
    if form == "save_to_disk":
        table.save_to_disk(tmp_path / "in", num_shards=2)
    else:
        (tmp_path / "in").mkdir()
        table.to_parquet(tmp_path / "in" / "a.parquet")
    expected = [
        utils.render_jinja_template([one["messages"]], one["tools"], chat_template=TEMPLATE)[0][0]
        for one in ROWS
    ]
    assert written(tmp_path / "in") == expected
