"""What is kept of loading tasks."""

from __future__ import annotations

import pytest

from rl_code.tasks.cache import Cache


def test_what_is_kept_is_found_by_the_next_process(tmp_path):
    path = tmp_path / "folder" / "cache.json"
    one, other = Cache(path), Cache(path)
    one.put({"a": [1]})
    other.put({"b": 2})  # at the same time, by another process
    assert Cache(path).get("b") == 2
    one.put({"c": 3})
    again = Cache(path)
    assert [again.get(key) for key in ("a", "c", "d")] == [[1], 3, None]
    assert [file.name for file in path.parent.iterdir()] == ["cache.json"]
    without = Cache(None)
    without.put({"a": 1})
    assert without.get("a") == 1


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_a_file_of_something_else_is_refused(tmp_path, text):
    path = tmp_path / "cache.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"cache\.json: not a cache of tasks .*; delete it"):
        Cache(path)
    assert path.read_text() == text
