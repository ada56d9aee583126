"""A reward model pays what its version says of the work, and the record says which version it was."""

from __future__ import annotations

import dataclasses
import json
import threading

import numpy as np
import pytest

from rl_code.config.read_config import ConfigError
from rl_code.environment.finished import FinishedEpisode, Grade
from rl_code.rewards.calibration import sigmoid
from rl_code.rewards.combine import combine
from rl_code.rewards.reading import Reading
from rl_code.rewards.reward_model import FOLDER, RewardModel
from rl_code.rewards.reward_model_folder import FILE
from rl_code.rewards.scorer import Scorer
from rl_code.types import Reward
from tests.rl_code.rewards.folders import make_folder, make_tokenizer
from tests.rl_code.rewards.test_rewards import finished
from tests.rl_code.signals import signals
from tests.rl_code.trajectories import with_context

WORKS = [f"x = {n}\n" for n in range(6)]


def episode(text: str = WORKS[0], version: int = 0, grade: Grade | None = None) -> FinishedEpisode:
    """An episode whose tokens were sampled by this version of the weights and the next one."""
    one = finished(grade or Grade(submitted=True, hidden=(False,)))
    versions = np.where(one.trajectory.sampled, version, -1).astype(np.int32)
    versions[-1] += 1
    return dataclasses.replace(
        one,
        task=dataclasses.replace(
            one.task, messages=({"role": "user", "content": "add"},), reference={"a.py": "x = 1\n"}
        ),
        trajectory=with_context(one.trajectory, versions=versions),
        files_before={"a.py": ""},
        files_after={"a.py": text},
    )


def pay(folder, given: FinishedEpisode, **settings) -> Reward:
    return combine(given, signals(dict(name="reward_model", folder=str(folder)) | settings))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model") / "rm", scale=(2.0, -0.5))


def test_the_probability_or_the_score_is_paid(folder):
    one = Scorer(folder)
    ids = one.ids(episode().task, "file a.py\n@ line 1\n+x = 0", None)
    score, probability = one.score(ids)
    assert probability == pytest.approx(sigmoid(np.float64(2.0 * score - 0.5)))
    paid = pay(folder, episode())
    assert paid.components == {"reward_model": probability}
    assert paid.notes["reward_model"] == {
        "version": 0,
        "score": score,
        "measures": {"probability": probability, "version": 0.0},
    }
    assert pay(folder, episode(), form="score").total == score
    # in [0, 1], another number for other work, and the same bits for the same
    totals = [pay(folder, episode(text)).total for text in WORKS]
    assert len(set(totals)) == len(WORKS) and all(0 < total < 1 for total in totals)
    assert totals == [pay(folder, episode(text)).total for text in WORKS]


def test_threads_get_the_bits_that_one_gets(folder):
    alone = [pay(folder, episode(text)).total for text in WORKS]
    found = [0.0] * len(WORKS)

    def work(number):
        found[number] = pay(folder, episode(WORKS[number])).total

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(WORKS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone


def test_only_honest_work_that_was_handed_in_is_scored(folder):
    for grade in (
        Grade(submitted=False),
        Grade(submitted=True, hidden=(True,), flags=("canary_passed",)),
    ):
        paid = pay(folder, episode(grade=grade))
        assert paid.total == 0.0 and paid.notes is None
    large = episode("x" * (5 << 20))
    assert pay(folder, large).notes == {"reward_model": {"failure": "too_large"}}


def test_a_model_with_sight_of_the_truth_depends_on_the_reference(folder, tmp_path):
    sees = make_folder(tmp_path / "sees", Reading(tokens=64, sees_reference=True))
    other = dataclasses.replace(episode().task, reference={"a.py": "y = [1, 2]\n"})
    changed = dataclasses.replace(episode(), task=other)
    assert pay(folder, episode()).total == pay(folder, changed).total
    assert pay(sees, episode()).total != pay(sees, changed).total


def test_the_version_is_that_of_the_weights_of_the_first_token(folder, tmp_path):
    make_folder(tmp_path / FOLDER, seeds=(7, 8, 9))  # version 0 is the first folder's
    retrain = dict(retrain=dict(every=10))
    paid = {}
    for version in (0, 9, 10, 19, 29):
        given = dataclasses.replace(episode(version=version), workdir=tmp_path)
        paid[version] = pay(folder, given, **retrain)
    notes = {version: reward.notes["reward_model"] for version, reward in paid.items()}
    assert {version: note["version"] for version, note in notes.items()} == {
        0: 0, 9: 0, 10: 1, 19: 1, 29: 2
    }  # fmt: skip
    assert notes[0]["work"] == "file a.py\n@ line 1\n+x = 0"
    assert paid[0] == paid[9] and paid[10] == paid[19]
    assert paid[0].total == pay(folder, episode()).total
    assert len({paid[version].total for version in (0, 10, 29)}) == 3


def test_versions_that_cannot_be_told_are_refused(folder):
    with pytest.raises(ConfigError, match="only a run has versions"):
        pay(folder, episode(), retrain=dict(every=10))
    unknown = episode()
    trajectory = with_context(unknown.trajectory, versions=np.full(9, -1, np.int32))
    unknown = dataclasses.replace(unknown, trajectory=trajectory, workdir=folder)
    with pytest.raises(ConfigError, match="are not known"):
        pay(folder, unknown, retrain=dict(every=10))


def test_a_folder_that_is_none_or_names_other_code_is_refused(folder, tmp_path):
    tokenizer = make_tokenizer()
    RewardModel(str(folder)).check_model(tokenizer)
    with pytest.raises(ConfigError, match=r"holds no reward model.*launch\.reward_model makes one"):
        pay(tmp_path, episode())
    with pytest.raises(ConfigError, match=r"holds no reward model.*launch\.reward_model makes one"):
        RewardModel(str(tmp_path)).check_model(tokenizer)
    (tmp_path / FILE).write_text((folder / FILE).read_text())
    with pytest.raises(ConfigError, match="no checkpoint of a reward model"):
        RewardModel(str(tmp_path)).check_model(tokenizer)
    content = json.loads((folder / FILE).read_text())
    content["attention"] = [{"name": "os:system", "settings": {}}]
    other = make_folder(tmp_path / "other")
    (other / FILE).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="no method of attention is called 'os:system'"):
        pay(other, episode())
