"""A file is there as a whole, or as it was."""

import pytest

from jaxpipe.runtime.storage.writing import replace_atomically


@pytest.mark.parametrize("synced", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_a_write_that_fails_changes_nothing(tmp_path, shared, synced):
    path, precious = tmp_path / "a", tmp_path / "precious"
    path.write_bytes(b"old")
    precious.write_bytes(b"precious")
    (tmp_path / "a.new").symlink_to(precious)

    def fail():
        with replace_atomically(path, shared=shared, synced=synced) as file:
            file.write(b"half")
            assert path.read_bytes() == b"old"
            raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        fail()
    assert path.read_bytes() == b"old"
    with replace_atomically(path, shared=shared, synced=synced) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert precious.read_bytes() == b"precious"
    left = {"a", "precious"} | ({"a.new"} if shared else set())
    assert {one.name for one in tmp_path.iterdir()} == left


def test_several_may_write_at_once_and_the_last_wins(tmp_path):
    path = tmp_path / "a"
    with replace_atomically(path) as first, replace_atomically(path) as second:
        first.write(b"first")
        second.write(b"second")
    assert path.read_bytes() == b"first"
    assert [one.name for one in tmp_path.iterdir()] == ["a"]
