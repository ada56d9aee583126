"""Commands as a shell takes them."""

from __future__ import annotations

import subprocess

import pytest

from rl_code.text.shell import command_line


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["python", "-m", "launch.train"], "python -m launch.train"),
        (["--a=('x', 'y')"], "\"--a=('x', 'y')\""),
        (["a b", ""], "'a b' ''"),
        (["it's $HOME"], "'it'\"'\"'s $HOME'"),
    ],
)
def test_a_line_is_short_and_a_shell_reads_its_words(words, line):
    assert command_line(words) == line
    read = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True)
    assert read.stdout.split("\0")[:-1] == words


def test_no_shell_takes_anything_in_a_word_for_its_own():
    words = ["'a'!", "'`b`'", "'\\'", "'$c'", "'\"'", "';&|<>()*?[]{}~#\n"]
    read = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {command_line(words)}"], capture_output=True, text=True
    )
    assert read.stdout.split("\0")[:-1] == words
