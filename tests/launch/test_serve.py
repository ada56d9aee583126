"""The program serves a run's weights, records what it answers, and ends when it is told to."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest

from launch import serve
from launch.serve_models import check_trained
from people.feedback.identity import AnswerIds, load_secret, user_key
from people.feedback.store import FeedbackStore
from rl_code.config.read_config import ConfigError, to_json
from rl_code.environment.documents import DocumentsConfig
from rl_code.host.files import write_atomically
from rl_code.run.workdir import CONFIG_FILE
from tests import programs
from tests.people.editor.test_server import ask, change, talk
from tests.people.feedback.people import answer
from tests.people.serving.scripted import openai_client

PATIENCE_S = 300.0
CONFIG = "--config=configs/tab.py:smoke", "--config.model.preset=tests.models.small:SHALLOW"


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """A server with these arguments, and its URL."""
    settings = dict(stderr=None, devices=None)
    with programs.start("launch.serve", "--port=0", *CONFIG, *arguments, **settings) as server:
        timer = threading.Timer(PATIENCE_S, server.kill)
        timer.start()
        try:
            lines = iter(server.stdout.readline, "")
            yield (
                server,
                next(found[0] for line in lines if (found := re.search(r"http://\S+", line))),
            )
        finally:
            timer.cancel()
            server.kill()


def test_nobody_else_may_read_what_people_wrote(tmp_path):
    record = tmp_path / "answers.jsonl"
    record.touch(0o644)
    files = [record, tmp_path / "people.db"]
    with (
        serve.recorder(str(record)),
        serve.open_store(f"sqlite:///{files[1]}", "secret", bytes(32)) as store,
    ):
        store.record_answer(answer("one", "ann"))
        files += [tmp_path / "people.db-wal"]
        assert [file.stat().st_mode & 0o777 for file in files] == [0o600] * 3
    for file in tmp_path.iterdir():
        file.chmod(0o644)
    with serve.open_store(f"sqlite:///{files[1]}", "secret", bytes(32)):
        assert files[1].stat().st_mode & 0o777 == 0o600
    write_atomically(record, b"", private=True)
    assert record.stat().st_mode & 0o777 == 0o600


def test_what_is_too_old_is_removed(tmp_path):
    now = time.time()
    with serve.open_store(f"sqlite:///{tmp_path}/people.db", "secret", bytes(32)) as store:
        store.record_answer(answer("old", "ann"))
        serve.remove_old(store, 2.0)
        assert store.counts()["answers"] == 1
        with mock.patch.object(serve.time, "time", lambda: now + 3 * 86_400):
            serve.remove_old(store, 2.0)
        assert store.counts()["answers"] == 0
    serve.remove_old(None, 2.0)


@pytest.mark.long
def test_answers_on_their_way_end_before_the_server_does(tmp_path):
    record, secret = tmp_path / "answers.jsonl", tmp_path / "secret"
    files = f"--record={record}", f"--secret={secret}"
    with serving(*files) as (server, url):
        client = openai_client(url, timeout=PATIENCE_S)
        stream = client.completions.create(
            model="policy", prompt="def f(x):\n", max_tokens=60, seed=1, stream=True
        )
        parts = iter(stream)
        texts = [next(parts).choices[0].text]  # it has begun
        server.send_signal(signal.SIGTERM)
        chunks = list(parts)
        texts += [chunk.choices[0].text for chunk in chunks]
        assert chunks[-1].choices[0].finish_reason in ("stop", "length")
        assert server.wait() == 0
    (answer,) = map(json.loads, record.read_text().splitlines())
    key = load_secret(secret)
    assert answer["user"] == user_key(key, "ada")
    assert AnswerIds(key).issued_to(answer["id"], answer["user"])
    assert answer["id"] == chunks[-1].id and len(answer["logprobs"]) == len(answer["tokens"])
    assert answer["finish_reason"] in ("stop", "length")


@pytest.mark.long
@pytest.mark.parametrize("with_database", [False, True])
def test_a_stream_that_died_by_a_kill_is_recorded_by_the_next_server(tmp_path, with_database):
    record, secret, url = (tmp_path / name for name in ("answers.jsonl", "secret", "people.db"))
    files = [f"--record={record}", f"--secret={secret}"]
    files += [f"--database=sqlite:///{url}"] if with_database else []
    with serving(*files) as (server, served_at):
        client = openai_client(served_at, timeout=PATIENCE_S)
        ask = dict(model="policy", prompt="def f(x):\n", seed=1, stream=True)
        (*_, whole) = client.completions.create(**ask, max_tokens=2)
        first = next(iter(client.completions.create(**ask, max_tokens=100)))
        server.kill()
        server.wait()
    with serving(*files):
        pass
    key = load_secret(secret)
    ended, dead = map(json.loads, record.read_text().splitlines())
    assert ended["id"] == whole.id and ended["finish_reason"] == "length"
    assert dead["id"] == first.id and AnswerIds(key).issued_to(dead["id"], user_key(key, "ada"))
    assert (dead["finish_reason"], dead["tokens"], dead["logprobs"]) == ("aborted", [], [])
    assert dead["extra"]["server_died"]
    if with_database:
        with FeedbackStore(f"sqlite:///{url}", ids=AnswerIds(key)) as store:
            assert store.counts()["answers"] == 2 and store.counts()["aborted"] == 1
            assert store.select(time.time(), [0]).ids == (whole.id,)


@pytest.mark.long
def test_an_editor_gets_suggestions_of_a_server_and_reports_what_became_of_them(
    tmp_path, monkeypatch
):
    """The two commands of docs/learning_from_people.md, with a model that has not learned anything."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    secret, url = tmp_path / "secret", f"sqlite:///{tmp_path / 'people.db'}"
    files = f"--database={url}", f"--secret={secret}"

    async def conversation(client, capabilities):
        for version in range(2, 40):  # some of its suggestions are empty
            if found := await ask(client):
                change(client, version, found[0].insert_text)
                return
            change(client, version, " ")

    with serving(*files) as (_, served_at):
        for _ in range(2):  # a document that is opened again is another session
            talk(served_at, conversation)
        store = FeedbackStore(url, ids=AnswerIds(load_secret(secret)))
        with store:
            ids = store.of_sessions(None, 0.0)
            found = store.joined(ids)
        user = user_key(load_secret(secret), "key-7")
        assert {answer.user for answer, _ in found} == {user}
        assert {answer.arm for answer, _ in found} == {"policy@0"}
        assert len({answer.session for answer, _ in found}) == 2
        kinds = [sorted(event.kind for event in events) for _, events in found if events]
        assert kinds == [["accepted", "shown"]] * 2
        headers = {"Authorization": "Bearer key-7"}
        forget = urllib.request.Request(f"{served_at}/users/me", method="DELETE", headers=headers)
        with urllib.request.urlopen(forget, timeout=PATIENCE_S) as answer:
            assert json.load(answer)["deleted"]["answers"] == len(found)


def test_weights_are_not_served_with_other_documents_than_they_were_trained_with(tmp_path):
    trained = DocumentsConfig(longest=64)
    kept = {"documents": trained, "rollout": {"engine": {"page": trained.page}}}
    (tmp_path / CONFIG_FILE).write_text(to_json(kept))
    for given in (None, DocumentsConfig(longest=32)):
        run = SimpleNamespace(config=SimpleNamespace(documents=given), saved_model=None)
        with pytest.raises(ConfigError, match=f"{tmp_path}.*longest.*64.*another mask"):
            serve.weights_of(run, str(tmp_path), None)
    run.config.documents = trained
    check_trained(tmp_path, run)


def test_a_database_needs_a_secret_that_stays(tmp_path):
    line = ["--config=configs/tab.py:smoke", f"--database=sqlite:///{tmp_path / 'people.db'}"]
    found = programs.run("launch.serve", *line, timeout=PATIENCE_S)
    assert found.returncode == 2
    assert "needs --secret=<file>" in found.stderr.replace("\n", " ")
