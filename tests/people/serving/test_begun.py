"""Answers that a kill cut off are recorded by the next server."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent import futures

from people.feedback.store import FeedbackStore
from people.realtime.recorded import metrics_of
from people.realtime.training import groups_of
from people.serving.begun import Begun, forget
from rl_code.types import Reward
from tests.people.serving.killed import dead
from tests.people.serving.scripted import PATIENCE_S, Scripted


def test_what_a_killed_server_was_sampling_is_left(tmp_path):
    path = tmp_path / "begun.jsonl"
    command = [sys.executable, "-m", "tests.people.serving.killed", str(path)]
    assert subprocess.run(command, timeout=PATIENCE_S).returncode == -signal.SIGKILL
    with path.open("a") as file:
        file.write('\x00\x00\n[]\n{"begin": {"id": "cut')
    again = Begun(path)
    assert again.left == (dead("b"), dead("c"))
    again.end(["b"])
    again.close()
    third = Begun(path)
    assert third.left == (dead("c"),)  # could not be recorded then
    third.end(["c"])
    third.close()
    assert path.read_bytes() == b"" and path.stat().st_mode & 0o777 == 0o600


def test_the_file_stays_small_and_tells_nothing_of_what_has_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("people.serving.begun._MOST_BYTES", 2_000)
    path = tmp_path / "begun.jsonl"
    begun = Begun(path)
    begun.begin([dead("open")])
    for number in range(200):
        begun.begin([dead(f"{number}")])
        begun.end([f"{number}"])
    assert path.stat().st_size < 4_000
    begun.compact()
    assert [json.loads(line)["begin"]["id"] for line in path.open()] == ["open"]
    begun.close()


def test_a_user_is_forgotten_in_what_killed_servers_left(tmp_path, monkeypatch):
    path = tmp_path / "begun.jsonl"
    mine, others = dead("a"), dataclasses.replace(dead("b"), user="bob")
    for file in (path, path.with_name("begun.jsonl.1")):
        begun = Begun(file)
        begun.begin([mine, others])
        begun.close()
    with monkeypatch.context() as patch:

        def held(lock):  # by a server that runs
            raise BlockingIOError(errno.EAGAIN, "held", str(lock))

        patch.setattr("people.serving.begun.lock", held)
        assert forget(path, mine.user) == 0
    assert forget(path, mine.user) == 2 and forget(path, mine.user) == 0
    assert Begun(path).left == Begun(path.with_name("begun.jsonl.1")).left == (others,)


def ask(url: str, words: str) -> urllib.request.Request:
    body = {"model": "policy", "messages": [{"role": "user", "content": words}]}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer ada"}
    return urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)


def test_a_server_notes_what_it_begins_and_the_next_one_records_it(tmp_path):
    path = tmp_path / "begun.jsonl"
    with FeedbackStore(f"sqlite:///{tmp_path}/people.db") as store, contextlib.ExitStack() as stack:
        begun = Begun(path)
        made = Scripted(stack, on_answer=store.submit_answer, begun=begun)
        made.load("policy", 1, "one")
        with urllib.request.urlopen(ask(made.endpoint.url, "first"), timeout=PATIENCE_S) as said:
            first = json.load(said)["id"]
        made.services[1].wait_none()
        made.services[1].at_once = False
        threads = stack.enter_context(futures.ThreadPoolExecutor(1))
        asked = ask(made.endpoint.url, "second")
        second = threads.submit(urllib.request.urlopen, asked, timeout=PATIENCE_S)
        job = made.services[1].wait_job()
        noted = path.read_bytes()  # all that a kill would leave now
        assert b"second" not in noted
        made.services[1].answer(job)
        with second.result() as said:
            lost = json.load(said)["id"]
        # another server finds the file as a kill left it
        (tmp_path / "killed.jsonl").write_bytes(noted)
        left = Begun(tmp_path / "killed.jsonl")
        (record,) = left.left
        ((given, _),) = store.joined([first])
        assert record.id != first and record.user == given.user and record.version == 1
        assert record.id == lost
        with store._writing() as connection:  # as if it had not been recorded
            connection.exec_driver_sql(f"DELETE FROM answers WHERE id = '{lost}'")
        Scripted(stack, on_answer=store.submit_answer, begun=left)
        assert store.record_answer(record) is False  # it is there
        assert store.counts()["aborted"] == 1 and store.counts()["answers"] == 2
        assert store.select(time.time(), [1]).ids == (first,)
        assert math.isnan(metrics_of(record, [])["latency"])
        # and the session that it was of is read as before
        rewards = [Reward(0.0, {})]
        assert groups_of([given], [0.5], rewards, [record])[1] == 0
