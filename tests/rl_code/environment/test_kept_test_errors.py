"""What each test said of the work is on record where it is asked for, and nowhere else."""

from __future__ import annotations

import pytest

from rl_code.environment.asked import Asked
from rl_code.store import serialization
from tests.rl_code.environment.scripted import play

RAISES = "def f(x):\n    return x[9]\n"
BAD = "def f(x):\n    return x\n"


def write(text):
    return f"<|call|>write\n{text}<|end|>"


SUBMIT = "<|call|>submit<|end|><|eot|>"


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        (BAD, ("failed", "", "failed", "")),
        (RAISES, ("IndexError: list index out of range",) * 4),
    ],
)
def test_what_tests_said_is_kept_where_asked_for(task, pool, tokenizer, limits, text, errors):
    # the first edit is graded after the work, and what is kept is of the work
    words = (write("def f(x):\n    return 1\n") + "<|eot|>", write(text) + SUBMIT)
    kept = play(task, pool, tokenizer, limits, *words, asked=Asked(test_errors=True))
    assert kept.test_errors == errors
    assert serialization.loads(serialization.dumps(kept)).test_errors == errors
    other = play(task, pool, tokenizer, limits, *words, asked=Asked(test_errors=False))
    assert other.test_errors is None
    assert b"test_errors" not in serialization.dumps(other)
    assert (other.solved, other.passed) == (kept.solved, kept.passed)


def test_work_that_was_not_handed_in_has_none(task, pool, tokenizer, limits):
    words = [write(BAD) + "<|eot|>"] * limits.turns
    assert (
        play(task, pool, tokenizer, limits, *words, asked=Asked(test_errors=True)).test_errors
        is None
    )
