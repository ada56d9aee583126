"""Which accepted tokens are alive."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from people.editor import tokens as module
from people.editor.tokens import Accepted, aligned, tokens

FILE = "def f(x):\n    return x + 1\n\n\ndef g(y):\n    return y * 2\n"
START = FILE.index("return x")
END = FILE.index("\n\n\ndef g")


def alive(now: str) -> float | None:
    return Accepted.at(FILE, START, END).alive(now)


def test_white_space_and_changes_elsewhere_do_not_count():
    assert alive(FILE) == 1.0
    assert alive(FILE.replace("x + 1", "x  +  1  # one").replace("y * 2", "y * 3")) == 1.0
    assert alive("import os\n\n" + FILE) == 1.0


def test_each_token_that_is_gone_counts_once():
    assert alive(FILE.replace("x + 1", "x + 2")) == 0.75
    assert alive(FILE.replace("return x + 1", "return 0")) == 0.25
    assert alive("") == 0.0


def test_moved_code_is_alive_in_the_greater_part():
    first, second = FILE.split("\n\n\n")
    moved = f"{second}\n\n{first}\n"
    # what stays in order is aligned, and both functions are equally long
    assert alive(moved) in (0.0, 1.0)


def test_broken_code_and_code_of_other_languages_have_tokens():
    assert alive(FILE.replace("def g(y):", "def g(y:(")) == 1.0
    found = Accepted.at("fn f() -> i32 { 1 }", 3, 6, "rust")
    assert found.alive("fn f() -> i32 { 2 }") == 1.0
    assert found.alive("fn g() -> i32 { 2 }") == pytest.approx(2 / 3)


def test_accepted_white_space_has_no_share():
    assert Accepted.at(FILE, END, END + 3).alive(FILE) is None


def test_tokens_have_their_places_beyond_ascii():
    text = 'x = "äöü€😀"  # ü\ny = 1\n'
    assert all(text[token.start : token.end] == token.text for token in tokens(text))
    assert tokens(text)[-1].text == "1"


def longest(a: str, b: str) -> int:
    """Length of the longest common subsequence, by the definition."""
    row = [0] * (len(b) + 1)
    for x in a:
        before = 0
        for j, y in enumerate(b, start=1):
            before, row[j] = row[j], before + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]


WORDS = st.text("abc", max_size=12)


@settings(max_examples=200, deadline=None)
@given(WORDS, WORDS)
def test_the_alignment_is_a_longest_common_subsequence(a, b):
    found = aligned(a, b)
    assert found == sorted(set(found))
    assert len(found) == longest(a, b)
    rest = iter(b)
    assert all(a[i] in rest for i in found)


def test_long_files_are_aligned_by_runs(monkeypatch):
    monkeypatch.setattr(module, "_CELLS", 0)
    assert aligned("abcde", "xbcdy") == [1, 2, 3]
