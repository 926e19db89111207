"""Text to shards beside the tokenizer alone: both see the same tokens."""

import re

from jaxpipe.bench import text
from jaxpipe.bench.__main__ import main
from jaxpipe.data.pieces import cut
from jaxpipe.data.prepare import Options


def test_prepare_is_measured_beside_the_tokenizer(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "eleven byte"}\n' * 1000)
    words = ["text", str(path), "--tokenizer", "bytes", "--workers", "1", "--rounds", "1"]
    assert main(words) == 0
    said = capsys.readouterr().out
    (ratio, busy) = re.findall(r"with prepare: ([\d.]+); of the processor ([\d.]+)", said)[0]
    assert f"prepare reaches {ratio} of the tokenizer alone, by the processor's" in said
    assert f"seconds {busy} (medians)" in said
    (piece,) = cut([path], 10**6)
    tokens, *seconds = text.encode_alone(piece, print, options=Options(tokenizer="bytes"))
    assert tokens == 11_000
    assert min(seconds) > 0
