"""The keys of one organisation count together, from the file of keys to the weights of a training
set.
"""

from __future__ import annotations

import contextlib
import hashlib
import time

import numpy as np

from people.feedback.identity import AnswerIds, origin_key, user_key
from people.feedback.poisoning import PoisoningConfig, weigh
from people.feedback.records import Event
from people.feedback.rewards.answered import answered
from people.feedback.store import FeedbackStore
from people.serving.access import Access, KeyFile
from people.simulated.client import Client
from rl_code.harness.endpoint.endpoint import Endpoint
from tests.people.serving.scripted import PATIENCE_S, SECRET, Scripted


def entry(key: str, organisation: str) -> str:
    hashed = hashlib.sha256(key.encode()).hexdigest()
    return f'[[keys]]\nsha256 = "{hashed}"\norganisation = "{organisation}"\n'


def test_a_hundred_keys_of_one_organisation_have_the_weight_of_one_origin(tmp_path):
    rng = np.random.default_rng(0)
    people = [(f"person {number}", f"company {number}") for number in range(12)]
    attackers = [(f"attacker {number}", "one") for number in range(100)]
    everybody = people + attackers
    file = tmp_path / "keys.toml"
    file.write_text("".join(entry(key, organisation) for key, organisation in everybody))
    url = f"sqlite:///{tmp_path / 'people.db'}"
    with FeedbackStore(url, ids=AnswerIds(SECRET)) as store, contextlib.ExitStack() as stack:
        made = Scripted(stack, on_answer=store.submit_answer)
        made.load("policy", 1, "one")
        access = Access(made.fleet, KeyFile(file))
        routes = access.feedback_routes(store)
        endpoint = stack.enter_context(Endpoint(access.find, routes=routes))
        for key, _ in everybody:
            client = Client(f"{endpoint.url}/v1", key, patience_s=PATIENCE_S)
            # attackers have no more answers each than people, and decide as people do
            found = [client.suggest("a", "b", "policy")]
            client.report([
                Event(
                    key=f"{number}",
                    answer=one.id,
                    kind="accepted" if rng.random() < 0.5 else "rejected",
                    at=time.time(),
                    value=float(np.exp(rng.standard_normal())),
                )
                for number, one in enumerate(found)
            ])  # fmt: skip
            client.close()
        given = answered(store.joined(store.of_sessions(None, 0.0)))
    assert len(given) == len(everybody)
    # the record names nobody
    origins = {one.answer.user: one.answer.extra["origin"] for one in given}
    assert origins == {
        user_key(SECRET, key): origin_key(SECRET, organisation) for key, organisation in everybody
    }
    config = PoisoningConfig()
    weights = weigh(given, config).weights
    theirs = np.array([one.answer.extra["origin"] == origin_key(SECRET, "one") for one in given])
    assert theirs.mean() > 0.85
    assert weights[theirs].sum() <= config.origin_share * weights.sum() * (1 + 1e-6)
    assert weights[~theirs].min() > 0


def test_a_key_without_an_organisation_has_no_origin(tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text(f'[[keys]]\nsha256 = "{hashlib.sha256(b"ada").hexdigest()}"\n')
    with contextlib.ExitStack() as stack:
        made = Scripted(stack, keys=KeyFile(file))
        made.load("policy", 1, "one")
        client = Client(f"{made.endpoint.url}/v1", "ada", patience_s=PATIENCE_S)
        client.suggest("a", "b", "policy")
        client.close()
        assert made.records[0].extra == {"index": 0}
