"""The reward of Tab jumps, and what is read from its episodes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import rich.console

from experiments.tab_jumps import report
from experiments.tab_jumps.asked import AskedToJump, shown
from experiments.tab_jumps.metrics import TabJumps
from models.tokenizer import Tokenizer
from people.realtime import held_out
from people.realtime.held_out import JudgeConfig
from people.simulated.jumper import JUMP_HABITS
from rl_code.config.named import Named
from rl_code.environment.protocols.infill import Infill
from rl_code.run.serving import ServingConfig
from rl_code.tasks import jumps
from rl_code.types import Group
from tests.experiments.suggesting import suggest

TOKENIZER = Tokenizer.train(["views.py:3"] * 8, 330, Infill.SPECIAL_TOKENS)
STREAM = [jumps.generate("train", 1, i) for i in range(40)]
TASK = next(task for task in STREAM if task.meta["remaining"])
DONE = next(task for task in STREAM if not task.meta["remaining"])
ASKED = Named("experiments.tab_jumps.asked:AskedToJump")


def episode(text: str, index: int = 0, task=TASK):
    return suggest(text, task, ASKED, TOKENIZER, index)


def wrong_place(task) -> str:
    """A line that needs nothing."""
    return next(place for place in task.meta["outline"] if place not in task.meta["remaining"])


def test_a_place_that_is_needed_is_mostly_taken_and_paid():
    needed = [episode(TASK.meta["remaining"][0], index).reward.total for index in range(20)]
    assert set(needed) <= {0.75, -0.25} and needed.count(0.75) > 10
    other = [episode(wrong_place(DONE), index, DONE).reward.total for index in range(20)]
    assert other.count(-0.25) > 15


@pytest.mark.parametrize("text", ["", "nowhere.py:1", "views.py"])
def test_nothing_is_shown_for_no_place_and_costs_nothing(text):
    trajectory = episode(text)
    assert shown(TASK, trajectory) is None
    assert trajectory.reward.total == 0.0 and trajectory.status == "submitted"


@pytest.mark.parametrize("wrong", [{"habits": "bored"}, {"people": 0}])
def test_wrong_settings_are_named(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        AskedToJump(**wrong)


def played() -> list[Group]:
    """One moment with a place and one without, four answers to each."""
    place = TASK.meta["remaining"][0]
    texts = (place, wrong_place(TASK), "", "x")
    first = Group(TASK, tuple(episode(text, i) for i, text in enumerate(texts)))
    texts = ("", "", wrong_place(DONE), "x")
    return [first, Group(DONE, tuple(episode(text, i, DONE) for i, text in enumerate(texts)))]


def test_metrics_count_what_was_shown():
    groups = played()
    found = TabJumps()(groups, {})
    taken = sum(one.reward.total > 0 for group in groups for one in group.trajectories)
    assert found["tab_jumps/shown"] == 3 / 8
    assert found["tab_jumps/taken"] == taken / 8
    assert found["tab_jumps/right_of_shown"] == pytest.approx(1 / 3)
    elsewhere = not TASK.meta["remaining"][0].startswith(f"{TASK.meta['here']}:")
    assert found["tab_jumps/other_file_of_shown"] == pytest.approx(elsewhere / 3)
    assert found["tab_jumps/found"] == 1 / 4 and found["tab_jumps/needless"] == 1 / 4
    assert found["tab_jumps/right"] == 4 / 8 and found["tab_jumps/unreadable"] == 2 / 8


def test_a_gate_scores_what_an_editor_shows():
    """What names no line of a file is nothing, and worth as much."""
    groups = played()
    judge = JudgeConfig(suggests="place", habits="careful")
    found = held_out.played(groups, judge, ServingConfig())
    assert found.rates["shown"] == 3 / 8
    place, wrong = TASK.meta["remaining"][0], wrong_place(TASK)
    chances = [judge.chance(TASK, place), judge.chance(TASK, wrong), *[held_out.NOTHING] * 2]
    assert chances[0] > held_out.NOTHING > chances[1]
    assert found.scores[TASK.id] == pytest.approx(sum(chances) / 4)


def test_the_report_compares_policies_kinds_and_people():
    groups = played()
    found = {("before", "train"): groups, ("after", "train"): groups[::-1]}
    console = rich.console.Console(width=240, record=True)
    console.print(report.rates(found, "usual"), report.by_kind(found), report.rewards(found))
    text = console.export_text()
    assert text.count("37.5 %") >= 2 and TASK.meta["kind"] in text
    assert all(name in text for name in JUMP_HABITS)


def test_moments_that_are_compared_fit_the_run():
    lengths = [len(TOKENIZER.encode(Infill().prompt(task, {}))) for task in STREAM[:8]]
    longest = sorted(lengths)[4]
    engine = SimpleNamespace(prompt_length=longest)
    config = SimpleNamespace(rollout=SimpleNamespace(engine=engine))
    found = report.moments(SimpleNamespace(config=config, tokenizer=TOKENIZER), "train", 4)
    fitting = [t for t, n in zip(STREAM, lengths, strict=False) if n <= longest]
    assert found == fitting[:4] and report.SEED == 1
