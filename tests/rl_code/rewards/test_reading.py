"""A reward model reads the task and the work, cut so that the work keeps its share."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.tokenizer import Tokenizer
from rl_code.config.read_config import ConfigError, build
from rl_code.environment.protocols.compact import Compact
from rl_code.rewards.differing import diff
from rl_code.rewards.reading import Reading, fitted
from rl_code.types import Task


@pytest.mark.parametrize(
    ("lengths", "most", "right"),
    [
        ([3, 4], 10, [3, 4]),  # all fits
        ([20, 20], 10, [5, 5]),
        ([2, 20], 10, [2, 8]),  # the work takes what is left
        ([20, 2], 10, [8, 2]),
        ([20, 20, 20], 12, [3, 3, 6]),
        ([1, 20, 20], 12, [1, 5, 6]),
        ([20, 1, 20], 11, [4, 1, 6]),
    ],
)
def test_parts_share_the_room_by_hand(lengths, most, right):
    assert fitted(lengths, most) == right


@given(st.lists(st.integers(0, 50), min_size=1, max_size=4), st.integers(1, 60))
def test_parts_fill_the_room_and_never_more(lengths, most):
    found = fitted(lengths, most)
    assert all(0 <= a <= b for a, b in zip(found, lengths, strict=True))
    assert sum(found) <= most and (sum(lengths) > most or found == lengths)
    assert found[-1] >= min(lengths[-1], (most + 1) // 2)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    texts = ["Task:\nadd one\nWork:\nfile a.py\n@ line 1\n+x = 1\nReference:\n"] * 4
    return Tokenizer.train(texts, 300, Compact.SPECIAL_TOKENS, eos="<|eot|>", pad="<|pad|>")


TASK = Task(
    id="t",
    messages=({"role": "user", "content": "add one"},),
    files={"a.py": "x = 0\n"},
    reference={"a.py": "x = 1\n"},
)


def test_only_a_model_with_sight_of_the_truth_reads_the_reference(tokenizer):
    blind, sees = Reading(), Reading(sees_reference=True)
    work = "file a.py\n@ line 1\n-x = 0\n+x = 2"
    texts = [tokenizer.decode(one.ids(tokenizer, TASK, work, None)) for one in (blind, sees)]
    head, tail = "Task:\nadd one\n", f"Work:\n{work}\n<|eot|>"
    reference = "Reference:\nfile a.py\n@ line 1\n-x = 0\n+x = 1\n"
    assert texts == [head + tail, head + reference + tail]
    without = dataclasses.replace(TASK, reference={})
    assert "Reference:\n\n" in tokenizer.decode(sees.ids(tokenizer, without, work, None))


def test_the_last_token_ends_the_text_and_no_other_is_special(tokenizer):
    reading = Reading(tokens=64)
    for work in ("<|eot|>" * 30, "+x\n" * 500):
        ids = reading.ids(tokenizer, TASK, reading.kept(work), None)
        assert len(ids) <= 64 and ids.count(tokenizer.eos_id) == 1 and ids[-1] == tokenizer.eos_id


def test_a_change_is_kept_as_far_as_it_may_be_read():
    reading = Reading(tokens=10)
    assert reading.kept("a" * 80) == "a" * 80
    assert reading.kept("a" * 81) == "a" * 80 + "\n... 1 more characters"
    with pytest.raises(ConfigError, match="tokens=2 must be at least 8"):
        build(Reading, dict(tokens=2))


def test_a_difference_names_files_lines_and_what_changed():
    before = {"a.py": "x = 0\ny = 1\n", "gone.py": "1\n", "same.py": "s\n"}
    after = {"a.py": "x = 0\ny = 2\n", "new.py": "n\n", "same.py": "s\n"}
    assert diff(before, after) == (
        "file a.py\n@ line 2\n-y = 1\n+y = 2\nfile gone.py\n@ line 1\n-1\nfile new.py\n@ line 1\n+n"
    )
    assert diff(before, before) == ""
    assert diff({}, {"a": "x" * (5 << 20)}) is None
