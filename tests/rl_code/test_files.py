"""A file that is written has its old content, or none, until all of the new is on the disk."""

from __future__ import annotations

import os

import pytest

from rl_code.host import files


class _Died(BaseException):
    """Stands for the end of the process, which cleans nothing up."""


@pytest.mark.parametrize("old", [None, b"old"], ids=["new", "there already"])
def test_who_dies_with_the_content_half_on_the_disk_changes_nothing(tmp_path, monkeypatch, old):
    path = tmp_path / "name"
    ways = [lambda: files.write_atomically(path, b"new")]
    if old is None:
        ways.append(lambda: files.write_once(path, b"new", tmp_path / "aside"))
    else:
        path.write_bytes(old)
    for write in ways:
        seen = []

        def die(descriptor: int, seen=seen) -> None:
            seen.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
            raise _Died

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", die)
            with pytest.raises(_Died):
                write()
        assert len(seen) == 1 and seen != ["name"]
        assert (path.read_bytes() if path.exists() else None) == old
        write()
        assert path.read_bytes() == b"new"
        path.unlink()
        if old is not None:
            path.write_bytes(old)


def test_of_two_writers_the_first_one_keeps_the_name(tmp_path):
    path = tmp_path / "name"
    assert files.write_once(path, b"one", tmp_path / "aside")
    assert not files.write_once(path, b"two", tmp_path / "aside")
    assert path.read_bytes() == b"one" and os.listdir(tmp_path) == ["name"]
