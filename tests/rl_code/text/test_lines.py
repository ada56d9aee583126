"""Lines end where Python's parser, editors and the shell end them."""

from __future__ import annotations

import ast
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_code.text.lines import common_ending, ending, split_lines, with_endings

BREAKS = ["\n", "\r\n", "\r"]
# What else ``str.splitlines`` ends lines at.
OTHERS = ["\f", "\v", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]
texts = st.lists(st.sampled_from([*BREAKS, *OTHERS, "a", " "]), max_size=12).map("".join)


@given(texts)
def test_lines_end_at_three_breaks_alone(text):
    lines = split_lines(text, keepends=True)
    assert "".join(lines) == text and "" not in lines
    bodies = split_lines(text)
    assert [body + ending(line) for body, line in zip(bodies, lines, strict=True)] == lines
    wanted = re.split(r"\r\n|\r|\n", text)
    assert bodies == (wanted if wanted[-1] else wanted[:-1])


@pytest.mark.parametrize("odd", OTHERS)
@pytest.mark.parametrize("end", BREAKS)
def test_numbers_are_those_of_syntax_trees(odd, end):
    text = end.join([f"a = '{odd}'  # {odd}", "def f():", "    return 1", ""])
    (_, function) = ast.parse(text).body
    assert split_lines(text)[function.lineno - 1] == "def f():"
    assert split_lines(text)[function.end_lineno - 1] == "    return 1"


@given(texts, st.sampled_from(BREAKS))
def test_texts_of_models_get_the_ends_of_a_file(text, end):
    assert common_ending(f"a{end}b{end}") == end
    text = text.replace("\r", "")
    assert with_endings(with_endings(text, end), end) == with_endings(text, end)
    assert split_lines(with_endings(text, end)) == split_lines(text)


def test_mixed_ends_are_none_in_common():
    assert common_ending("a\r\nb\n") == common_ending("a") == common_ending("") == "\n"
