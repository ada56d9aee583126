"""launch.papers prints its table, runs what is missing, and says what failed."""

from __future__ import annotations

import sys
import types

import pytest
from absl import flags

from launch import papers as command
from sweeps import papers


@pytest.fixture
def given(monkeypatch, tmp_path):
    """Runs the command on a table of one's own; returns its exit code."""
    read = papers.read

    def run(table: str, *words: str) -> int:
        known = flags.FlagValues()
        flags.DEFINE_bool("run", False, "", flag_values=known)
        flags.DEFINE_list("only", [], "", flag_values=known)
        flags.DEFINE_string("page", None, "", flag_values=known)
        known(["papers", *words])
        (tmp_path / "table.toml").write_text(table)
        rows = read(tmp_path / "table.toml")
        monkeypatch.setattr(command, "FLAGS", known)
        monkeypatch.setattr(command, "WORKDIR", types.SimpleNamespace(value=None))
        monkeypatch.setattr(command, "RUNS", str(tmp_path / "runs"))
        monkeypatch.setattr(papers, "read", lambda: rows)
        return command.main([])

    return run


def table(**commands: str) -> str:
    """One paper for each name, with one command."""
    return "\n".join(
        f'[[paper]]\nname = "{name}"\ntitle = "{name}"\narxiv = "2401.00001"\nclaim = "c"\n'
        f'expected = "e"\ncommands = ["python -m {line}"]'
        for name, line in commands.items()
    )


def test_a_paper_that_fails_does_not_hold_up_the_others_which_run_once(given, capfd):
    two = table(bad="no_such_module", good="zipfile -h")
    assert given(two, "--run") == 1
    out = capfd.readouterr().out
    assert "[1/2] bad failed with exit code 1" in out and "[2/2] good 1/1: python -m zipfile" in out
    assert "ran in 0 min" in " ".join(out.split())
    assert given(two, "--run", "--only=good") == 0
    assert "0 papers to run" in capfd.readouterr().out


def test_a_failure_that_would_repeat_itself_has_its_code(given, capfd):
    assert given(table(wrong="zipfile --no_such_flag"), "--run") == 2
    assert "wrong failed with exit code 2" in capfd.readouterr().out


def test_the_table_of_one_paper_has_its_commands(given, capfd):
    assert given(table(good="zipfile -l {workdir}/a"), "--only=good") == 0
    out = capfd.readouterr().out
    assert "not run" in out and "/runs/a" in out and sys.executable not in out


def test_the_whole_table_ends_with_the_papers_that_nobody_ran(given, capfd):
    assert given(table(one="zipfile -h", two="zipfile -h")) == 0
    *_, shows, runs = capfd.readouterr().out.splitlines()
    assert shows == "python -m launch.papers --only=one shows the commands of one."
    assert runs == "--run runs those that nobody ran: one, two."


def test_a_page_is_written(given, tmp_path):
    path = tmp_path / "papers.md"
    assert given(table(good="zipfile -h"), f"--page={path}") == 0
    assert "| `good` |" in path.read_text()
