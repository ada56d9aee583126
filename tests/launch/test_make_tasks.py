"""The command that makes tasks says what is wrong with its input, and makes nothing then."""

from __future__ import annotations

from tests import programs

GOOD = f"shop==1.0 --hash=sha256:{'0' * 64}\n"


REFUSED = [
    (None, "--json", "No such file"),
    ("shop>=1.0\n", "--json", "line 1: expected name==version --hash=sha256:"),
    (GOOD, "--deletions=-1", "must not be negative"),
    (GOOD, "--jobs=0", "jobs"),
]


def test_bad_input_is_refused(tmp_path):
    for number, (text, flag, words) in enumerate(REFUSED):
        listed = tmp_path / f"packages{number}.txt"
        if text is not None:
            listed.write_text(text)
        line = f"--packages={listed}", f"--out={tmp_path / 'out'}", flag
        done = programs.run("launch.make_tasks", *line)
        assert done.returncode == 2 and words in done.stderr, done
    assert not (tmp_path / "out").exists()
