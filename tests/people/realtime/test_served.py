"""The adapters of the real parts, without a model; ``test_realtime_served`` has one."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from configs import realtime
from models.sharding import MeshConfig, make_mesh
from people.feedback.checks import Claims
from people.feedback.config import FeedbackConfig
from people.feedback.identity import AnswerIds
from people.feedback.poisoning import PoisoningConfig
from people.feedback.records import Event
from people.feedback.rewards.answered import answered
from people.feedback.rewards.combine import FeedbackRewardConfig, make_reward
from people.feedback.store import FeedbackStore
from people.feedback.waiting import Wait
from people.realtime import tables
from people.realtime.held_out import HeldOut
from people.realtime.ledger import Ledger
from people.realtime.parts import Overtaken, Routing, TrainingFailed
from people.realtime.served import Served, Spoiled, System
from people.realtime.served_fleet import ServedFleet
from people.realtime.served_store import ServedStore
from people.serving.router import AUTO
from rl_code.config import read_config
from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.host.stop import Stopped, StopRequest
from rl_code.rewards.combine import SignalConfig
from rl_code.types import Group
from tests.people.realtime.test_training import ANSWER
from tests.people.serving.scripted import SECRET as SCRIPTED_SECRET
from tests.people.serving.scripted import Scripted, openai_client, scripted

SECRET = bytes(range(32))


class FakeModels:
    """Notes what it is told; refuses what ``serving.models.Models`` refuses."""

    def __init__(self):
        self.loaded: dict[str, object] = {}
        self.promoted = ""
        self.router = None
        self.told: list[str] = []

    def load(self, name, version, weights):
        key = f"{name}@{version}"
        assert key not in self.loaded
        self.loaded[key] = weights
        self.told.append(f"load {key}")

    def promote(self, name, version):
        self.promoted = f"{name}@{version}"
        assert self.promoted in self.loaded

    def route(self, alias, router):
        assert alias == AUTO and set(router.arms) <= set(self.loaded)
        self.router = router
        self.told.append(f"route {' '.join(router.arms)}")

    def retire(self, name, version, timeout_s):
        key = f"{name}@{version}"
        assert key != self.promoted and key not in self.router.arms
        del self.loaded[key]
        self.told.append(f"retire {key}")


@pytest.fixture
def fleet():
    models = FakeModels()
    return ServedFleet(models, "policy", lambda version: f"weights {version}", 1.0), models


def test_a_candidate_is_loaded_gets_its_share_and_the_other_is_retired_last(fleet):
    served, models = fleet
    assert served.routing() is None
    served.apply(Routing(0, turn=(1, 0)))
    watched = Routing(0, 1, 0.25, "cycle-1", (1, 3))
    served.apply(watched)
    assert served.routing() == watched
    assert models.loaded == {"policy@0": "weights 0", "policy@1": "weights 1"}
    arms = [models.router.choose(f"user {i}", "") for i in range(2_000)]
    assert 0.2 < arms.count("policy@1") / len(arms) < 0.3
    assert arms == [models.router.choose(f"user {i}", "another") for i in range(2_000)]
    models.told.clear()
    served.apply(Routing(1, turn=(1, 5)))
    assert models.told == ["route policy@1", "retire policy@0"]
    assert models.promoted == "policy@1"


def test_the_same_again_changes_nothing_and_an_older_routing_is_refused(fleet):
    served, models = fleet
    served.apply(Routing(0, 1, 0.5, "cycle-1", (1, 3)))
    told = list(models.told)
    served.apply(Routing(0, 1, 0.5, "cycle-1", (1, 3)))
    assert models.told == told
    with pytest.raises(Overtaken):
        served.apply(Routing(0, turn=(1, 2)))
    assert models.told == told


def test_a_routing_that_was_cut_short_is_made_whole(fleet):
    served, models = fleet
    served.apply(Routing(0, turn=(1, 0)))
    failing = [OSError("the disk is gone")]

    def weights(version):
        if failing:
            raise failing.pop()
        return "weights"

    served._weights = weights
    watched = Routing(0, 1, 0.5, "cycle-1", (1, 3))
    with pytest.raises(OSError):
        served.apply(watched)
    assert served.routing() == Routing(0, turn=(1, 0))
    served.apply(watched)
    assert served.routing() == watched and "policy@1" in models.loaded


@pytest.fixture
def store(tmp_path):
    engine = tables.connect(f"sqlite:///{tmp_path}/people.db")
    feedback = FeedbackStore(engine, ids=AnswerIds(SECRET))
    reward = make_reward(FeedbackRewardConfig())
    with feedback:
        yield ServedStore(feedback, reward, Wait(), PoisoningConfig()), feedback, engine


def answers(feedback, count: int, version: int = 0) -> list[str]:
    ids = AnswerIds(SECRET)
    made = [ids.make("ada", version, i) for i in range(count)]
    for i, id in enumerate(made):
        fields = dict(id=id, version=version, versions=(version,) * 2, session=f"s{i // 2}")
        arm = dict(arm=f"policy@{version}")
        feedback.record_answer(dataclasses.replace(ANSWER, **fields, **arm))
    return made


def record(feedback, user: str, version: int, number: int, **changes) -> str:
    """Records an answer of the arm of a version; its id."""
    id = AnswerIds(SECRET).make(user, version, number)
    fields = dict(id=id, user=user, version=version, versions=(version,) * 2)
    arm = dict(arm=f"policy@{version}", session=f"s{number}")
    feedback.record_answer(dataclasses.replace(ANSWER, **fields | arm | changes))
    return id


def test_one_database_has_answers_and_cycles(store):
    served, feedback, engine = store
    ledger = Ledger(engine)
    ledger.start(0, 1.0)
    made = answers(feedback, 4)
    assert ledger.current().number == 1
    selection = served.select(time.time(), [0], 0)
    assert list(selection.ids) == made and selection.sessions == 2
    served.mark_used(1, selection)
    assert served.used(1).ids == selection.ids and served.used(2) is None
    with pytest.raises(Overtaken):
        served.mark_used(2, selection)


def test_answers_wait_for_their_events(store):
    _, feedback, _ = store
    answers(feedback, 2)
    reward = make_reward(FeedbackRewardConfig())
    young = ServedStore(feedback, reward, Wait(3_600.0), PoisoningConfig())
    assert young.select(time.time(), [0], 0).ids == ()


def test_all_metrics_are_there_before_anybody_came(store):
    sessions = store[0].sessions([0, 1], 0.0)
    for name in ("reward", "reward/tab", "accepted", "latency", "length"):
        assert sessions.metric(name).shape == (0,)


def test_sessions_have_rewards_and_their_parts(store):
    served, feedback, _ = store
    first, _ = answers(feedback, 2)
    events = [Event("k1", first, "shown", 3.0, 0.1), Event("k2", first, "accepted", 4.0, 1.0)]
    assert {one.status for one in feedback.record_events(events, "ada")} == {"recorded"}
    sessions = served.sessions([0], 0.0)
    assert sessions.session.tolist() == ["s0"]
    # one of two was accepted; nobody saw the other one
    np.testing.assert_allclose(sessions.metric("reward/tab"), [0.375])
    assert sessions.metric("reward")[0] == pytest.approx(
        sum(sessions.metric(f"reward/{name}")[0] for name in ("tab", "retention", "latency"))
    )


def test_a_session_that_crosses_a_cycle_is_trained_on_whole(tmp_path):
    """Two turns of an agent over HTTP, of which each is another cycle's."""
    feedback = FeedbackStore(f"sqlite:///{tmp_path}/people.db", ids=AnswerIds(SCRIPTED_SECRET))
    kept = ServedStore(feedback, make_reward(FeedbackRewardConfig()), Wait(), PoisoningConfig())
    trained: dict[int, tuple[list[Group], dict]] = {}
    system = SimpleNamespace(
        _config=SimpleNamespace(
            run=SimpleNamespace(seed=0), feedback=FeedbackConfig(), spoiled=Spoiled()
        ),
        _record=feedback,
        _reward=make_reward(FeedbackRewardConfig()),
        _run=SimpleNamespace(mesh=make_mesh(MeshConfig(data=1, tensor=1))),
        _versions=SimpleNamespace(
            made_of=lambda version: None,
            state=lambda version: None,
            write=lambda version, groups, _, told: trained.update({version: (groups, told)}),
        ),
        _updates=lambda state, groups: (groups, {"updates": 1}),
        _counts=lambda answers, behind: None,
        _reward_models=None,
    )
    with feedback, scripted(on_answer=feedback.submit_answer) as made:
        client = openai_client(f"{made.endpoint.url}/v1")
        messages = [{"role": "user", "content": "hello"}]
        for cycle in (1, 2):
            said = client.chat.completions.create(
                model="policy", messages=messages, extra_headers={"X-Session": "task"}
            )
            message = {"role": "assistant", "content": said.choices[0].message.content}
            messages += [message, {"role": "user", "content": f"again {cycle}"}]
            selection = kept.select(time.time(), [1], 0)
            assert selection.ids == (said.id,)
            kept.mark_used(cycle, selection)
            assert System.train(system, cycle, 0, cycle, selection, {0: 0}) == 1
    for groups, told in trained.values():
        assert len(groups) == 1 and told["left_out"] == 0
    first, second = (groups[0].trajectories[0] for groups, _ in trained.values())
    # the second turn goes on from all tokens of the first, and its own alone are trained on
    assert second.tokens[: len(first.tokens)].tolist() == first.tokens.tolist()
    assert second.sampled.sum() == first.sampled.sum() < len(second.tokens)
    assert not second.sampled[: len(first.tokens)].any()


def test_the_test_pays_a_question_as_training_does(store):
    """On an ambiguous task it earns what the answer after it does, which is another answer."""
    _, feedback, _ = store
    signals = (SignalConfig(Named("asked")),)
    reward = make_reward(FeedbackRewardConfig(signals))
    ids = AnswerIds(SECRET)
    question, edit = (ids.make("ada", 0, number) for number in range(2))
    asked = dict(version=0, versions=(0, 0), session="s", kind="chat", arm="a")
    extra = {"question": True, "ambiguous": True}
    for id, more in ((question, dict(extra=extra)), (edit, dict(asked_at=200.0))):
        feedback.record_answer(dataclasses.replace(ANSWER, id=id, **asked, **more))
    happened = [
        Event("k1", edit, "accepted", 3.0, 1.0),
        Event("k2", edit, "retained", 33.0, 0.8, 30.0),
    ]
    feedback.record_events(happened, "ada")
    sessions = ServedStore(feedback, reward, Wait(), PoisoningConfig()).sessions([0], 0.0)
    trained = [reward(one).total for one in answered(feedback.joined([question, edit]))]
    assert trained == [0.8, 0.0]
    np.testing.assert_allclose(sessions.metric("reward"), [np.mean(trained)])


def test_who_asks_for_a_version_by_its_name_is_not_in_the_test(store):
    served, feedback, _ = store
    record(feedback, "ada", 0, 0)
    record(feedback, "ada", 1, 1, arm="")  # as policy@1
    sessions = served.sessions([0, 1], 0.0)
    assert sessions.version.tolist() == [0]


def test_answers_that_were_cut_off_are_seen_by_the_test_and_never_trained_on(store):
    served, feedback, _ = store
    whole = record(feedback, "ada", 1, 0, first_token_s=0.5)
    record(feedback, "bob", 1, 1, finish_reason="aborted", first_token_s=60.0)
    sessions = served.sessions([1], 0.0)
    assert sessions.user.tolist() == ["ada", "bob"]
    assert sessions.metric("aborted").tolist() == [0.0, 1.0]
    assert sessions.metric("latency").tolist() == [0.5, 60.0]
    # what was on its way does not make answers shorter
    assert sessions.metric("length")[0] == 2.0 and math.isnan(sessions.metric("length")[1])
    selection = served.select(time.time(), [1], 0)
    assert selection.ids == (whole,) and selection.aborted == 1


def test_who_accepts_everything_does_not_move_the_test(store):
    """Nor are those left out who have a bad version, compared with whom has a good one."""
    served, feedback, _ = store
    rng = np.random.default_rng(0)
    # version 0 is nearly always accepted, the candidate hardly ever
    people = [(f"person {i}", 0, 0.95) for i in range(9)]
    people += [(f"person {i}", 1, 0.02) for i in range(9, 13)] + [("attacker", 1, 1.0)]
    for user, version, chance in people:
        events = []
        for number in range(40):
            id = record(feedback, user, version, number)
            kind = "accepted" if rng.random() < chance else "rejected"
            seconds = 1.5 * math.exp(1.2 * rng.standard_normal())
            events.append(Event(f"{number}", id, kind, 2.0, seconds))
        feedback.record_events(events, user)
    found = served.sessions([0, 1], 0.0)
    assert sorted({*found.user}) == sorted(user for user, _, _ in people if user != "attacker")
    assert found.of(1).metric("accepted").mean() < 0.2


class SystemAtWork(System):
    """One that serves by scripted engines and learns nothing."""

    def __init__(self, made: Scripted):
        train = SimpleNamespace(tasks_per_step=2, group_size=1)
        config = SimpleNamespace(run=SimpleNamespace(train=train))
        super().__init__(config, Path(), 0, 2, SECRET, None, None)
        self._url, self._servers = made.endpoint.url, made.fleet
        self.updates = 0

    def _learner(self, state, groups, newest):
        self.updates += 1
        os.kill(os.getpid(), signal.SIGTERM)  # in the midst of an update
        assert self._servers.not_ready == "the server ends"
        return state, {"train/finite": True}


def test_a_signal_ends_serving_at_once_and_training_after_the_update():
    with contextlib.ExitStack() as stack:
        made = Scripted(stack)
        made.load("policy", 0, "one")
        system = SystemAtWork(made)
        assert made.fleet.not_ready == ""
        with StopRequest(system.stop) as stop, stop.deferred():
            with pytest.raises(Stopped, match="before answer 2"):
                system._updates(None, ["a", "b", "c", "d"])
        assert stop.requested and system.updates == 1


class Counted(System):
    """One whose updates note the version that the learner is told."""

    def __init__(self, window: int):
        config = SimpleNamespace(
            run=SimpleNamespace(train=SimpleNamespace(tasks_per_step=2, group_size=1))
        )
        super().__init__(config, Path(), 0, window, SECRET, None, None)
        self.versions = []

    def _learner(self, state, groups, version):
        self.versions.append(version)
        return state, {"train/finite": True}


def test_the_learner_counts_updates():
    """It refuses tokens that are older than the window by its own count."""
    system = Counted(4)
    given = [dataclasses.replace(ANSWER, versions=(version,) * 2) for version in (3, 5)]
    assert system._counts(given, {3: 2, 5: 0, 9: 7}) == {3: 2, 5: 4}
    _, metrics = system._updates(None, ["a", "b", "c", "d", "e"])
    assert system.versions == [4, 5, 6] and metrics["updates"] == 3
    # a config that was changed after a selection was marked
    with pytest.raises(TrainingFailed, match="3 is None updates old"):
        system._counts(given, {5: 0})
    with pytest.raises(TrainingFailed, match=r"5 is 2 updates old.*window=2 allows 1"):
        Counted(2)._counts(given, {3: 0, 5: 2})
    with pytest.raises(TrainingFailed, match="5 answers are 3 updates of 2"):
        Counted(2)._updates(None, ["a", "b", "c", "d", "e"])


def test_suites_stop_after_an_episode():
    def rollout(*_, on_finished, **__):
        on_finished(None)

    run = SimpleNamespace(
        config=SimpleNamespace(seed=0),
        episode=None,
        task_sets=SimpleNamespace(of_suite=lambda suite: []),
    )
    suite = SimpleNamespace(samples=1)
    stopping = HeldOut(run, SimpleNamespace(rollout=rollout), None, None, None, lambda: True)
    with pytest.raises(Stopped, match="suites of version 3"):
        stopping._play(suite, None, 3)


def test_a_model_of_documents_is_served_without_a_reward_model():
    given = realtime.get_config("smoke").parts
    with given.ignore_type():
        given.run.documents = {}
        del given.name
    made = read_config.build(Served, given, "config.parts")
    assert made.run.train.pack.documents == made.run.documents
    with given.ignore_type():
        given.learned = {}
    with pytest.raises(ConfigError, match=r"learned is set, and so is run.documents"):
        read_config.build(Served, given, "config.parts")


def test_an_accepted_answer_waits_until_its_last_look_can_have_come():
    assert FeedbackConfig().wait == Wait(3_600.0, 3_590.0)
    # simulated people know it at once, so nothing is waited for but their reports
    given = realtime.get_config().parts.feedback
    claims = read_config.build(Claims, given.claims)
    assert FeedbackConfig(silence_s=given.silence_s, claims=claims).wait == Wait(5.0, 0.0)
