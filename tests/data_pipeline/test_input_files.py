"""Which files of a folder are prepared."""

from jaxpipe.data.pieces import list_input_files


def test_hidden_files_and_caches_of_python_are_skipped(tmp_path):
    """A folder of sources has caches as soon as Python has imported it."""
    for name in ("a.py", "b/c.py", ".git/x", "b/.y", "__pycache__/a.pyc", "b/__pycache__/c.pyc"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("x")
    found = list_input_files([tmp_path]).files
    assert [file.relative_to(tmp_path).as_posix() for file in found] == ["a.py", "b/c.py"]
