"""The examples do what they say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from examples import grading, learning, own_model, recording, sampling
from tests.late import Late
from tests.rl_code.recording.conftest import recorded, stand_in  # noqa: F401

pyplot = Late("matplotlib.pyplot")


def test_only_the_right_answer_passes():
    passed = grading.main()
    assert passed.pop("right") == (True, True, True)
    assert set(passed.values()) == {(False, False, False)}


def test_a_prompt_samples_the_same_alone():
    both, _, alone = sampling.main()
    assert both == alone
    assert len({tuple(tokens) for tokens in both}) == 4


@pytest.mark.long
def test_the_answer_becomes_more_likely():
    chances = learning.main(steps=8)
    assert chances[-1] > 2 * chances[0]


@pytest.mark.long
def test_a_model_of_ones_own_learns_to_repeat():
    losses = own_model.main(steps=100)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.long
def test_every_update_of_a_recording_is_made_again(recorded, capsys):  # noqa: F811
    assert recording.main([str(recorded), str(recorded)]) == [True] * 5
    assert "the runs are equal" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "said"), [([], "arguments are required: run"), (["nowhere"], "nowhere")]
)
def test_a_recording_that_is_not_there_is_said_in_a_line(given, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        recording.main(given)
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert said in told and "Traceback" not in told


@pytest.mark.long
def test_the_notebook_reads_a_recording(recorded, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("RUN", str(recorded))
    pyplot.switch_backend("Agg")
    notebook = json.loads(Path(recording.__file__).with_name("read_a_run.ipynb").read_text())
    names = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec("".join(cell["source"]), names)
    pyplot.close("all")
    assert [row["step"] for row in names["rows"]] == names["store"].consumed() == [0, 1, 2, 3, 4]
    said = capsys.readouterr().out
    assert all(turn.text in said for turn in names["best"].turns)
    assert " sampled tokens, 1 to 1 versions old" in said
