"""Labels of turns from continuations, and the forms in which their scores are paid, by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from rl_code.config import read_config
from rl_code.config.named import Named
from rl_code.learner.optimizer import OptimizerConfig
from rl_code.learner.process_credit import ProcessCredit
from rl_code.recording.process_training import ProcessModelConfig, shape_of
from rl_code.rewards import process_model
from rl_code.rewards.combine import RewardConfig, find_signals
from rl_code.rewards.process import FORMS, ProcessReward, folder_of, pay
from rl_code.rewards.step_labels import borders_in, end_of, labelled, split
from rl_code.types import Context, Fork, Reward, Turn
from tests.rl_code.learner.conftest import make_group, make_trajectory

# A prompt of two tokens; messages of 2, 1 and 2 tokens, with answers of one token between.
SAMPLED = [0, 0, 1, 1, 0, 1, 0, 1, 1]
TURNS = (
    Turn("prompt", 0, 2, ""),
    Turn("assistant", 2, 4, ""),
    Turn("tool", 4, 5, ""),
    Turn("assistant", 5, 6, ""),
    Turn("tool", 6, 7, ""),
    Turn("assistant", 7, 9, ""),
    Turn("tool", 9, 9, ""),
)


def member(index=0, **changes):
    made = make_trajectory(np.arange(9), SAMPLED, prompt_length=2, index=index)
    return dataclasses.replace(made, turns=TURNS, **changes)


def paid(index, total, turns, component=None, **changes):
    component = sum(turns) if component is None else component
    notes = {"process": {"turns": turns}} if turns else None
    reward = Reward(total + component, {"tests": total, "process": component}, (), notes)
    return member(index, reward=reward, **changes)


# --- Labels ---------------------------------------------------------------------------------------


def test_labels_are_shares_of_continuations_that_solved():
    def went_on(index, turn, length, solved, **changes):
        return member(index, fork=Fork(0, turn, (length,)), solved=solved, **changes)

    group = dataclasses.replace(
        make_group([member(0, solved=True), member(1), member(2, status="fault")]),
        continuations=(
            *(went_on(3 + at, 1, 5, at == 0) for at in range(4)),
            went_on(7, 2, 7, True),
            went_on(8, 2, 7, False, status="fault"),
        ),
    )
    first, second, *others = labelled([group])
    assert (first.task_id, first.text.places) == ("task0", (4, 6, 8))
    assert first.text.labels == (0.25, 1.0, 1.0) and first.text.weights == (1.0, 1.0, 1.0)
    assert (second.text.places, second.text.labels) == ((8,), (0.0,))
    # of a continuation the end alone is its own
    assert [one.text.labels for one in others] == [(1.0,), (0.0,), (0.0,), (0.0,), (1.0,)]
    (only,) = labelled([group], "hard", ends=False)
    assert only.text.places == (4, 6) and only.text.labels == (1.0, 1.0)
    with pytest.raises(ValueError, match=r"held_out=1\.5 must be at least 0 and below 1"):
        ProcessModelConfig(("a",), "a", OptimizerConfig(0.1), held_out=1.5)
    with pytest.raises(ValueError, match="estimation='firm' must be 'soft' or 'hard'"):
        next(labelled([group], "firm"))


def test_borders_stand_behind_what_tools_answered():
    assert borders_in(member()) == [4, 6, 8] and end_of(member()) == 8
    silent = dataclasses.replace(member(), turns=TURNS[:1])
    assert borders_in(silent) == [] and end_of(silent) is None
    sub = (Turn("prompt", 0, 2, "", context=1), Turn("assistant", 2, 3, "", context=1))
    assert borders_in(dataclasses.replace(member(), turns=(*TURNS, *sub))) == [4, 6, 8]


def test_tasks_are_held_out_whole_and_always_the_same():
    found = [
        dataclasses.replace(one, task_id=f"t{number % 50}")
        for number, one in enumerate([next(labelled([make_group([member()])]))] * 100)
    ]
    kept, held_out = split(found, 0.3)
    names = {one.task_id for one in kept}, {one.task_id for one in held_out}
    assert not names[0] & names[1] and 5 < len(names[1]) < 25
    assert {one.task_id for one in split(found[::-1], 0.3)[1]} == names[1]
    assert split(found, 0.0)[1] == []


# --- Forms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("sum", [0.5, 0.25, 0.75]),
        ("mean", [0.5 / 3, 0.25 / 3, 0.25]),
        ("minimum", [0.0, 0.25, 0.0]),
        ("difference", [0.125, -0.25, 0.5]),
    ],
)
def test_scores_are_paid_in_four_forms(form, expected):
    np.testing.assert_allclose(pay([0.375, 0.5, 0.25, 0.75], form), expected)
    assert pay([0.375], form) == [] and len(FORMS) == 4


def test_differences_come_to_the_same_whatever_stands_between():
    rng = np.random.default_rng(0)
    for _ in range(20):
        between = rng.random(rng.integers(1, 6)).tolist()
        assert sum(pay([0.25, *between, 0.75], "difference")) == pytest.approx(0.5)


class Known:
    """A scorer that knows what each place is worth."""

    step = 7

    def scores(self, tokens, places):
        return [float(np.float32(place / 16)) for place in places]


def test_the_signal_pays_by_the_scores_and_writes_them_down(monkeypatch):
    asked = []
    monkeypatch.setattr(process_model, "scorer", lambda *given: asked.append(given) or Known())
    episode = type("Episode", (), {"trajectory": member()})
    found = ProcessReward("runs/prm@300", "difference")(episode)
    assert asked == [(Path("runs/prm"), 300)]
    assert found.value == pytest.approx((8 - 1) / 16)
    assert found.notes["scores"] == [1 / 16, 4 / 16, 6 / 16, 8 / 16]
    assert found.notes["turns"] == pytest.approx([3 / 16, 2 / 16, 2 / 16])
    assert found.notes["updates"] == 7 and found.notes["measures"] == {"score": 6 / 16}
    silent = type("Episode", (), {"trajectory": dataclasses.replace(member(), turns=())})
    assert ProcessReward("runs/prm")(silent).value == 0.0


def test_a_config_names_model_and_form(tmp_path):
    assert folder_of("runs/prm") == (Path("runs/prm"), None)
    assert folder_of("runs/prm@20") == (Path("runs/prm"), 20)
    (tmp_path / "a@1").mkdir()
    assert folder_of(f"{tmp_path}/a@1") == (tmp_path / "a@1", None)
    for settings, message in (
        ({"form": "product"}, "form = 'product': expected .*sum.*difference"),
        ({"weights": ""}, "weights='' must name the folder"),
    ):
        with pytest.raises(read_config.ConfigError, match=message):
            signals = (dict(name="process", **{"weights": "runs/prm", **settings}),)
            find_signals(read_config.build(RewardConfig, {"signals": signals}))
    with pytest.raises(read_config.ConfigError, match="no failure may earn as much as a solution"):
        read_config.build(
            RewardConfig, {"signals": ("tests", dict(name="process", weights="runs/prm"))}
        )
    with pytest.raises(read_config.ConfigError, match="holds no process reward model"):
        process_model.read(tmp_path)
    with pytest.raises(read_config.ConfigError, match=r"^config\.backbone = '\S+' does not exist"):
        shape_of(str(tmp_path / "nowhere"))


def test_no_method_of_others_is_looked_up_by_a_file(tmp_path):
    described = process_model.Description((Named("os:system"),))
    process_model.write(tmp_path, described)
    assert process_model.read(tmp_path) == described
    with pytest.raises(read_config.ConfigError, match="no method of attention is called 'os:sys"):
        process_model.shape_of(tmp_path)


# --- Credit ---------------------------------------------------------------------------------------


def test_credit_is_what_is_paid_from_a_turn_on():
    # amounts 1, 0, 2 and 1, 2, 0: mean 1 and variance 4/6; rests 1 and 0, centred 1/2 and -1/2
    group = make_group([paid(0, 1.0, (1.0, 0.0, 2.0)), paid(1, 0.0, (1.0, 2.0, 0.0))])
    first, second = ProcessCredit(scale=False)(group)
    np.testing.assert_allclose(first, [0.5, 0.5, 0.5, 1.5, 1.5])
    np.testing.assert_allclose(second, [-0.5, -0.5, -0.5, -1.5, -1.5])
    assert first.dtype == np.float32
    std = (4 / 6) ** 0.5
    first, second = ProcessCredit(eps=0.0, weight=0.5)(group)
    np.testing.assert_allclose(first, 1 + 0.5 * np.array([0, 0, 0, 1, 1]) / std, rtol=1e-6)
    np.testing.assert_allclose(second, -1 - 0.5 * np.array([0, 0, 0, 1, 1]) / std, rtol=1e-6)


def test_episodes_without_amounts_get_the_rest_alone():
    group = make_group([paid(0, 1.0, ()), paid(1, 0.0, (0.0, 1.0, 0.5)), paid(2, 0.5, ())])
    first, second, third = ProcessCredit(scale=False)(group)
    assert (first, third) == (0.5, 0.0)
    np.testing.assert_allclose(second, [-0.5, -0.5, 0.0, -0.5, -0.5])
    faulty = [paid(0, 1.0, (9.0, 9.0, 9.0), status="fault"), *group.trajectories[1:]]
    credits = ProcessCredit(scale=False)(make_group(faulty))
    assert credits[0] == 0.0 and credits[2] == pytest.approx(0.25)
    np.testing.assert_allclose(credits[1], [-0.25, -0.25, 0.25, -0.25, -0.25])


def test_tokens_of_sub_agents_get_what_the_first_turn_gets():
    sub = Context(*(np.ones(3, kind) for kind in (np.int32, bool, np.float32, np.int32)))
    one = paid(0, 0.0, (1.0, 0.0, 2.0))
    one = dataclasses.replace(one, contexts=(*one.contexts, sub))
    credit, _ = ProcessCredit(scale=False)(make_group([one, paid(1, 0.0, (1.0, 2.0, 0.0))]))
    np.testing.assert_allclose(credit, [0, 0, 0, 1, 1, 0, 0, 0])


def test_amounts_of_other_turns_are_named():
    with pytest.raises(ValueError, match=r"task0.*'process' pays 2 amounts for 3 turns"):
        ProcessCredit()(make_group([paid(0, 0.0, (1.0, 2.0))]))
