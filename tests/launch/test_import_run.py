"""The commands on the run of another trainer, from its dump to the first group that differs."""

from __future__ import annotations

import json

import pytest

from tests import programs
from tests.rl_code.foreign import dumps


def test_a_foreign_run_is_imported_searched_and_bisected(tmp_path):
    for name, change in (("a", None), ("b", (20, 1, 1))):
        dump = dumps.trl(tmp_path / f"dump_{name}", chat=True, change=change)
        flags = ["--format=trl", dump, f"--workdir={tmp_path / name}", "--solved_from=1"]
        done = programs.run("launch.import_run", *flags)
        assert done.returncode == 0, done.stderr
        assert "2 steps (10 to 20), 2 of them new: 4 groups, 8 episodes" in done.stdout
        assert "no sampled tokens: what is stored are texts" in done.stdout
    search = [f"--workdir={tmp_path / 'a'}", f"--beside={tmp_path / 'b'}", "--search=IndexError"]
    done = programs.run("launch.report", *search)
    assert done.returncode == 0 and "1 found" in done.stdout, done.stderr
    page = (tmp_path / "a" / "report_search.html").read_text()
    assert "IndexError" in page and '"passed":true' in page
    done = programs.run("launch.bisect", tmp_path / "a", tmp_path / "b")
    assert done.returncode == 1 and "part at step 20: " in done.stdout, done.stderr
    assert "group 1 (trl-" in done.stdout and "equal before: 3 groups" in done.stdout


def test_the_mismatch_of_a_foreign_run_is_told_by_token(tmp_path):
    tokenizer = dumps.tokenizer(tmp_path / "tok")
    flags = [f"--workdir={tmp_path / 'run'}", f"--tokenizer={tokenizer}", "--format=prime_rl"]
    done = programs.run("launch.import_run", dumps.DATA / "prime_rl_a", *flags)
    assert done.returncode == 0 and "376 sampled tokens, 376 of them with" in done.stdout
    done = programs.run("launch.mismatch", flags[0], "--step=2", "--top=2")
    assert done.returncode == 0 and "stant>s" in done.stdout, done.stderr
    done = programs.run("launch.mismatch", flags[0], "--step=3")
    assert done.returncode == 2 and "has the steps [1, 2]" in done.stderr
    done = programs.run("launch.train", "--config=configs/quickstart.py:smoke", flags[0])
    assert done.returncode == 2 and "holds a run of another trainer" in done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--format=verl"], "name the files of the dump"),
        (["dump"], "--format is missing; it is one of prime_rl, trl, verifiers, verl"),
        (["--format=vrl", "dump"], "Did you mean 'verl'?"),
        (["--format=no.such:Thing", "dump"], "there is no module 'no"),
        (["--format=verl", "--format_settings={", "dump"], "is no JSON"),
        (["--format=verl", '--format_settings={"a": 1}', "dump"], "--format.a: no such key"),
        (["--format=verl", "nowhere"], "nowhere: no such file or folder"),
        (["--format=verl", "--tokenizer=nowhere", "dump"], "--tokenizer=nowhere: "),
    ],
)
def test_bad_command_lines_are_named(tmp_path, flags, words):
    dumps.verl(tmp_path / "dump")
    words_of = [str(tmp_path / "dump") if flag == "dump" else flag for flag in flags]
    done = programs.run("launch.import_run", *words_of, f"--workdir={tmp_path / 'run'}")
    assert done.returncode == 2 and words in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2 and not (tmp_path / "run").exists()


def test_a_bad_value_ends_in_one_line_that_names_it(tmp_path):
    dump = dumps.verl(tmp_path / "dump")
    with open(dump / "2.jsonl", "a") as file:
        file.write(json.dumps({"input": "a", "output": None}) + "\n")
    flags = ["--format=verl", dump, f"--workdir={tmp_path / 'run'}"]
    done = programs.run("launch.import_run", *flags)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2
    assert last == f"{dump}/2.jsonl, line 5, field 'output': expected a text, found None"
