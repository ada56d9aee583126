"""The red team on tasks of others: what is said of a wrong command line, and what Ctrl-C leaves."""

from __future__ import annotations

import json

import pytest
from absl import flags
from absl.testing import flagsaver

from launch import redteam, redteam_tasks
from rl_code.host.stop import INTERRUPTED
from rl_code.redteam import foreign
from rl_code.redteam.foreign import Paid
from rl_code.tasks.generated import generate
from rl_code.tasks.source import Refusal, SourceOfWorlds


class Three(SourceOfWorlds):
    """Two tasks, and one that cannot be built between them."""

    def count(self):
        return 3

    def load_each(self, pool, workdir):
        yield "a", generate("train", 0, 0)
        yield "b", Refusal("its image is missing")
        yield "c", generate("train", 0, 1)


@pytest.fixture(autouse=True)
def parsed():
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["test"])
    with flagsaver.flagsaver():
        yield


def test_kinds_of_tasks_stand_alone(capsys):
    for given, named in (
        (dict(harbor="x", swe="y"), "--harbor and --swe"),
        (dict(swe="y", only=["chooser"]), "--swe and --only"),
        (dict(swe="y", verifiers=["z"]), "--swe and --verifiers"),
    ):
        with flagsaver.flagsaver(**given), pytest.raises(SystemExit) as ended:
            redteam.main([])
        assert ended.value.code == 2
        assert f"{named} cannot stand together" in capsys.readouterr().err


@pytest.mark.parametrize(("stops", "code"), [(False, 1), (True, INTERRUPTED)])
def test_attempts_before_ctrl_c_are_kept(monkeypatch, tmp_path, capsys, stops, code):
    def tried(task, pool, limits):
        yield Paid(task.id, "a process left behind", foreign.SUITE, 1.0)
        if stops:
            raise KeyboardInterrupt

    monkeypatch.setattr(redteam_tasks, "find_source", lambda named, path: Three())
    monkeypatch.setattr(redteam_tasks, "_settings", lambda store: {})
    monkeypatch.setattr(foreign, "left_over", lambda task, pool: [])
    monkeypatch.setattr(foreign, "tried", tried)
    out = tmp_path / "attempts.json"
    with flagsaver.flagsaver(json=str(out)):
        assert redteam_tasks.run("harbor", "tasks") == code
    kept = json.loads(out.read_text())
    assert len(kept["attempts"]) == (1 if stops else 2)
    said = capsys.readouterr().out
    assert ("stopped" in said) == stops
    assert stops or "b: not tried: its image is missing" in said


def test_a_taskset_that_cannot_be_loaded_is_said(capsys):
    with (
        flagsaver.flagsaver(verifiers=["a"], settings='{"python": "no_such_python"}'),
        pytest.raises(SystemExit) as ended,
    ):
        redteam.main([])
    assert ended.value.code == 2
    assert "--verifiers=a: tasks.python = 'no_such_python' cannot be started" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("given", [[], ["a", ""]])
def test_tasksets_without_a_name_are_refused(given, capsys):
    with flagsaver.flagsaver(verifiers=given), pytest.raises(SystemExit) as raised:
        redteam.main([])
    assert raised.value.code == 2 and "give ids of tasksets" in capsys.readouterr().err
