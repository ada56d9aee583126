"""Versions come and go while others answer; every answer is recorded; limits hold."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest

from people.feedback.identity import AnswerIds, user_key
from people.realtime.recorded import metrics_of
from people.serving import exchanges
from people.serving.access import KeyFile
from people.serving.counted import RATES
from people.serving.exchanges import ChatExchange, CompletionExchange
from people.serving.router import Shares, Thompson
from people.serving.running import Running
from rl_code.harness.endpoint.answers import Pending
from rl_code.harness.endpoint.fields import ApiError
from rl_code.run.serving import AutoConfig
from tests.late import Late
from tests.people.serving.scripted import PATIENCE_S, SECRET, openai_client, scripted

openai = Late("openai")


HELLO = [{"role": "user", "content": "hello"}]


def client_of(made, key="ada", **options):
    return openai_client(f"{made.endpoint.url}/v1", key, **options)


def said(client, model="policy", **options):
    body = client.chat.completions.create(model=model, messages=HELLO, **options)
    return body.choices[0].message.content


def in_thread(function):
    """Starts a function; what joins it and returns or raises what it came to."""
    results = []

    def run():
        try:
            results.append((function(), None))
        except Exception as error:
            results.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()

    def join():
        thread.join(PATIENCE_S)
        value, error = results[0]
        if error is not None:
            raise error
        return value

    return join


def test_an_answer_is_recorded_before_its_client_has_it():
    with scripted() as made:
        body = client_of(made).chat.completions.create(model="policy", messages=HELLO)
        (record,) = made.records
        assert record.id == body.id and AnswerIds(SECRET).issued_to(record.id, record.user)
        assert record.user == user_key(SECRET, "ada")
        assert (record.model, record.version, record.adapter, record.arm) == ("policy", 1, "", "")
        assert record.finish_reason == "stop" and record.kind == "chat"
        assert len(record.tokens) == len(record.logprobs) == len(record.versions)
        assert record.asked_at <= record.asked_at + record.first_token_s <= record.answered_at


def tool(name):
    schema = {"type": "object", "properties": {"text": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def call(name):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"text": "a"}}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("words", "tools", "known"),
    [
        ("Which of the two?", [], dict(question=True, questions=1.0)),
        ("done.", ["bash"], dict(question=False, questions=0.0, invalid_calls=0.0)),
        (
            call("ask"),
            ["ask", "edit_file"],
            dict(question=True, questions=1.0, invalid_calls=0.0, edits=0.0),
        ),
        (
            call("edit_file"),
            ["ask", "edit_file"],
            dict(question=False, questions=0.0, invalid_calls=0.0, edits=1.0),
        ),
        (call("nothing"), ["bash"], dict(question=False, questions=0.0, invalid_calls=1.0)),
        (
            "<tool_call>{broken",
            ["edit_file"],
            dict(question=False, questions=0.0, invalid_calls=1.0, edits=0.0),
        ),
    ],
)
def test_a_record_says_what_an_agent_did(words, tools, known):
    with scripted() as made:
        made.load("policy", 2, words)
        made.services[2].length = 2_000  # schemas are long
        declared = [tool(name) for name in tools]
        said(client_of(made), "policy@2", **(dict(tools=declared) if declared else {}))
        (record,) = made.records
        assert record.extra == {"index": 0} | known
        metrics = metrics_of(record, [])
        rates = {name: metrics[name] for name in RATES if not math.isnan(metrics[name])}
        assert rates == {name: value for name, value in known.items() if name != "question"}


def test_an_answer_that_cannot_be_recorded_is_not_given():
    def full(record):
        raise OSError("no space")

    with scripted(on_answer=full) as made:
        with pytest.raises(openai.InternalServerError, match="could not be recorded") as caught:
            said(client_of(made))
        assert caught.value.status_code == 503
        # before the stream begins or within it
        with pytest.raises(openai.APIError, match="could not be recorded"):
            list(client_of(made).completions.create(model="policy", prompt="a b", stream=True))
        assert made.fleet.models.running == 0


def test_a_version_is_swapped_without_dropping_a_stream():
    with scripted() as made:
        client = client_of(made)
        made.services[1].at_once = False
        stream = iter(client.chat.completions.create(model="policy", messages=HELLO, stream=True))
        next(stream)
        job = made.services[1].wait_job()
        made.load("policy", 2, "two")
        assert [model.id for model in client.models.list()] == ["policy", "policy@1", "policy@2"]
        assert client.models.retrieve("policy@2").id == "policy@2"
        made.fleet.models.promote("policy", 2)
        retired = in_thread(lambda: made.fleet.models.retire("policy", 1))
        # of another session: those of one session wait for each other
        other = client_of(made, "bob")
        assert said(other) == "two" and said(other, "policy@2") == "two"
        while "policy@1" in made.fleet.models.names():
            pass
        with pytest.raises(openai.NotFoundError, match="'policy@1' does not exist"):
            said(other, "policy@1")
        assert not made.services[1].closed
        made.services[1].answer(job)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == "one"
        retired()
        assert made.services[1].closed and not made.services[2].closed
        assert [record.version for record in made.records if record.tokens][-1] == 1


def test_what_is_needed_is_not_retired_and_what_is_not_there_is_named():
    with scripted() as made:
        models = made.fleet.models
        models.load("policy", 2, "two")
        for call, why in (
            (lambda: models.retire("policy", 1), "promote another version first"),
            (lambda: models.retire("policy", 3), "'policy@3' is not served; there is policy@1"),
            (lambda: models.load("policy", 2, "x"), "policy@2 is served already"),
            (lambda: models.load("../etc", 2, "x"), "must be up to 64 letters"),
            (lambda: models.load("a", -1, "x"), "version=-1"),
            (lambda: models.promote("policy", 9), "'policy@9' is not served"),
            (lambda: models.route("auto", Shares("x", {"policy@9": 1.0})), "'policy@9'"),
            (lambda: models.load_adapter("a", 1, {}, "none@1"), "base='none@1' is no model"),
            (lambda: models.reward("auto", "policy@1", 1.0), "'auto' has no router"),
        ):
            with pytest.raises(ValueError, match=why):
                call()
        models.route("auto", Shares("x", {"policy@2": 1.0}))
        with pytest.raises(ValueError, match="policy@2 is an arm of 'auto'"):
            models.retire("policy", 2)


def test_users_keep_their_arm_and_records_name_it():
    with scripted() as made:
        made.load("policy", 2, "two")
        router = Shares("x", {"policy@1": 0.5, "policy@2": 0.5})
        made.fleet.models.route("auto", router)
        arms = {}
        for key in map(str, range(12)):
            client = client_of(made, key)
            texts = {said(client, "auto") for _ in range(2)}
            assert len(texts) == 1
            arms[user_key(SECRET, key)] = {"one": "policy@1", "two": "policy@2"}[texts.pop()]
        assert set(arms.values()) == {"policy@1", "policy@2"}
        assert all(record.arm == arms[record.user] for record in made.records)
        # one that learns takes its place at once
        made.fleet.models.route("auto", Thompson(["policy@1", "policy@2"], AutoConfig()))
        for _ in range(200):
            made.fleet.models.reward("auto", "policy@2", 0.75)
            made.fleet.models.reward("auto", "policy@1", -0.25)
        assert said(client_of(made), "auto", extra_headers={"X-Session": "new"}) == "two"


def test_a_client_that_leaves_frees_its_row():
    with scripted() as made:
        service = made.services[1]
        service.at_once = False
        for stream in (False, True):
            body = json.dumps({"prompt": "a b", "stream": stream}).encode()
            with socket.create_connection(("127.0.0.1", made.endpoint.port)) as connection:
                head = (
                    f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
                )
                connection.sendall(head.encode() + b"\r\n" + body)
                service.wait_job()
            service.wait_none()
        for _ in range(100):  # the record follows at once
            if len(made.records) == 2:
                break
            time.sleep(0.1)
        assert [record.finish_reason for record in made.records] == ["aborted"] * 2
        assert all(len(record.tokens) == 1 for record in made.records)
        assert made.fleet.models.running == 0


def test_a_request_waits_for_the_one_before_it_in_its_session():
    with scripted() as made:
        service = made.services[1]
        service.at_once = False
        named = {"X-Session": "a"}
        first = in_thread(lambda: said(client_of(made), extra_headers=named))
        job = service.wait_job()
        second = in_thread(lambda: said(client_of(made), extra_headers=named))
        # another session of the same key does not wait
        third = in_thread(lambda: said(client_of(made), extra_headers={"X-Session": "b"}))
        other = service.wait_job(2)
        assert len(service.jobs) == 2
        service.answer(other)
        third()
        service.answer(job)
        first()
        service.answer(service.wait_job())
        second()
        sessions = [record.session for record in made.records]
        assert sessions[1] == sessions[2] != sessions[0]


def test_chats_without_a_session_wait_only_where_they_go_on_from_the_same_answer():
    with scripted() as made:
        service = made.services[1]
        service.at_once = False
        client = client_of(made)

        def ask(*texts):
            roles = ("user", "assistant")
            messages = [
                {"role": roles[number % 2], "content": text} for number, text in enumerate(texts)
            ]
            body = client.chat.completions.create(model="policy", messages=messages)
            return body.choices[0].message.content

        # the same question, another one, and one behind an answer that nobody has given
        chats = ("hello",), ("hello",), ("hi",), ("hello", "made up", "go on")
        joins = []
        for number, texts in enumerate(chats):
            joins.append(in_thread(lambda texts=texts: ask(*texts)))
            service.wait_job(number + 1)
        for number, job in enumerate(list(service.jobs)):
            service.answer(job, ("one", "two", "three", "four")[number])
        assert [join() for join in joins] == ["one", "two", "three", "four"]
        sessions = [record.session for record in made.records]
        assert len({*sessions}) == 4
        # each goes on in its own session, from the tokens of its own answer
        for texts, session in zip(
            (("hello", "two", "go on"), ("hello", "one", "go on"), ("hi", "three", "go on")),
            (sessions[1], sessions[0], sessions[2]),
            strict=True,
        ):
            join = in_thread(lambda texts=texts: ask(*texts))
            service.answer(service.wait_job())
            join()
            assert made.records[-1].session == session
            assert made.records[-1].kept > 0 and made.records[-1].context == 0
        # two that go on from one answer are of one session
        first = in_thread(lambda: ask("hi", "three", "left"))
        job = service.wait_job()
        second = in_thread(lambda: ask("hi", "three", "right"))
        other = in_thread(lambda: ask("bye"))
        service.answer(service.wait_job(2))
        other()
        assert service.jobs == [job]
        service.answer(job)
        first()
        service.answer(service.wait_job())
        second()
        assert {record.session for record in made.records[-2:]} == {sessions[2]}


def test_one_who_asks_much_does_not_have_the_chats_of_others_forgotten(monkeypatch):
    monkeypatch.setattr(exchanges, "_UNNAMED", 3)
    with scripted() as made:
        said(client_of(made, "bob"))
        for _ in range(10):
            said(client_of(made))
        users = [user for user, _ in made.fleet._conversations._known]
        assert users.count(user_key(SECRET, "bob")) == 1
        assert users.count(user_key(SECRET, "ada")) == 3


def test_more_than_there_is_room_for_is_refused_and_may_come_again():
    with scripted(most_requests=2) as made:
        service = made.services[1]
        service.at_once = False
        joins = [in_thread(lambda key=key: said(client_of(made, key))) for key in "ab"]
        service.wait_job(2)
        with pytest.raises(openai.RateLimitError, match="2 requests wait already") as caught:
            said(client_of(made, "c"))
        assert int(caught.value.response.headers["Retry-After"]) >= 1
        for job in list(service.jobs):
            service.answer(job)
        assert [join() for join in joins] == ["one", "one"]
        service.at_once = True
        assert said(client_of(made, "c")) == "one"
    with scripted(pages_ahead=0.5) as made:  # of 100 pages with 4 tokens each
        service = made.services[1]
        service.at_once = False
        first = in_thread(lambda: said(client_of(made), max_tokens=160))
        job = service.wait_job()
        with pytest.raises(openai.RateLimitError, match="pages of the cache already"):
            said(client_of(made, "c"), max_tokens=160)
        with pytest.raises(openai.RateLimitError, match="pages of the cache already"):
            ask = dict(model="policy", prompt="a b", max_tokens=160, stream=True)
            client_of(made, "c").completions.create(**ask)
        service.answer(job)
        first()
        assert made.fleet._pages == {}


def test_the_end_waits_for_answers_and_refuses_new_ones():
    with scripted() as made:
        service = made.services[1]
        service.at_once = False
        client = client_of(made)
        url = made.endpoint.url
        assert client._client.get(f"{url}/readyz").status_code == 200
        first = in_thread(lambda: said(client))
        job = service.wait_job()
        drained = in_thread(made.fleet.drain)
        while not made.fleet.not_ready:
            pass
        assert client._client.get(f"{url}/readyz").status_code == 503
        assert client._client.get(f"{url}/healthz").status_code == 200
        with pytest.raises(openai.InternalServerError, match="the server ends") as caught:
            said(client_of(made, "c"))
        assert caught.value.status_code == 503
        service.answer(job)
        assert first() == "one" and drained() is True
    with scripted(drain_s=0.01) as made:
        made.services[1].at_once = False
        late = in_thread(lambda: said(client_of(made)))
        made.services[1].wait_job()
        assert made.fleet.drain() is False
        made.fleet.close()
        with pytest.raises(openai.InternalServerError, match="cut off"):
            late()
        assert [record.finish_reason for record in made.records] == ["aborted"]


def test_keys_and_their_limits(tmp_path):
    def entry(key, limits=""):
        return f'[[keys]]\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n{limits}\n'

    now = [0.0]
    path = tmp_path / "keys.toml"
    path.write_text(
        entry("ada", "requests_per_minute = 2")
        + entry("bob", "concurrent = 1")
        + entry("eve", "tokens_per_minute = 10")
    )
    with scripted(keys=KeyFile(path, lambda: now[0])) as made:
        with pytest.raises(openai.AuthenticationError, match="not known here"):
            said(client_of(made, "nobody"))
        ada, eve = client_of(made, "ada"), client_of(made, "eve")
        said(ada)
        said(ada)
        with pytest.raises(openai.RateLimitError, match="2 answers per minute") as caught:
            said(ada)
        assert caught.value.response.headers["Retry-After"] == "30"
        now[0] += 30.0
        said(ada)
        # what a request took too much comes back before the next one
        said(eve)
        with pytest.raises(openai.RateLimitError, match="10 tokens per minute"):
            said(eve)
        made.services[1].at_once = False
        first = in_thread(lambda: said(client_of(made, "bob")))
        job = made.services[1].wait_job()
        with pytest.raises(openai.RateLimitError, match="1 requests of this key"):
            said(client_of(made, "bob"))
        made.services[1].answer(job)
        first()
        made.services[1].at_once = True
        # a key is withdrawn; a file that is wrong changes nothing
        path.write_text(entry("ada"))
        now[0] += 10.0
        with pytest.raises(openai.AuthenticationError):
            said(client_of(made, "bob"))
        path.write_text("keys = 3")
        now[0] += 10.0
        assert said(ada) == "one"


def test_chats_of_a_user_who_is_forgotten_are_not_in_memory_any_more():
    with scripted() as made:
        ada, bob = client_of(made, "ada"), client_of(made, "bob")
        said(ada)
        said(bob)
        known = made.fleet._conversations._known
        made.fleet.forget(made.fleet.user_of("ada"))
        assert [user for user, _ in known] == [made.fleet.user_of("bob")]
        # one that is being answered is forgotten with its answer
        made.services[1].at_once = False
        answered = in_thread(lambda: said(bob))
        job = made.services[1].wait_job()
        made.fleet.forget(made.fleet.user_of("bob"))
        made.services[1].answer(job)
        assert answered() == "one" and not known
        made.services[1].at_once = True
        assert said(ada) == "one"


def test_a_key_may_send_so_many_events(tmp_path):
    now = [0.0]
    path = tmp_path / "keys.toml"
    hashes = [hashlib.sha256(key).hexdigest() for key in (b"ada", b"bob")]
    path.write_text(
        f'[[keys]]\nsha256 = "{hashes[0]}"\nevents_per_minute = 60\n'
        f'[[keys]]\nsha256 = "{hashes[1]}"\nadmin = true\n'
    )
    with scripted(keys=KeyFile(path, lambda: now[0])) as made:
        access = made.access
        assert access.find_user("nobody") is None
        assert access.find_user("ada") == made.fleet.user_of("ada")
        assert access.take_events("ada", 50) == 0.0
        assert access.take_events("ada", 20) == 10.0  # and takes none
        assert access.take_events("ada", 10) == 0.0
        assert access.take_events("bob", 10_000) == 0.0
        assert [access.is_admin(key) for key in ("ada", "bob", "nobody")] == [False, True, False]
        now[0] += 60.0
        # more than a minute gives are let in when the minute is full, and owed
        assert access.take_events("ada", 90) == 0.0
        assert access.take_events("ada", 1) == 31.0


def test_counts_are_shown_without_names_of_users():
    with scripted() as made:
        client = client_of(made)
        said(client)
        with pytest.raises(openai.NotFoundError):
            said(client, "nothing")
        text = client._client.get(f"{made.endpoint.url}/metrics").text
        line = (
            'serving_answers_total{adapter="",finish_reason="stop",model="policy",version="1"} 1.0'
        )
        assert line in text
        assert 'serving_refused_requests_total{status="404"} 1.0' in text
        assert "serving_running_requests 0.0" in text
        assert made.records[0].user not in text


def test_nothing_of_a_request_stays_when_it_is_over():
    with scripted() as made:
        client = client_of(made)
        for number in range(2):
            session = {"X-Session": f"{number}"}
            said(client, extra_headers=session)
            list(client.completions.create(model="policy", prompt="a b", stream=True, n=2))
            with pytest.raises(openai.BadRequestError):
                said(client, max_tokens=0)
            with pytest.raises(openai.BadRequestError, match="the longest has 199"):
                client.completions.create(model="policy", prompt="a b " * 150)
        del client
        made.endpoint.close()
        gc.collect()
        kinds = Running, Pending, CompletionExchange, ChatExchange
        assert [each for each in gc.get_objects() if type(each) in kinds] == []
        assert made.fleet.models.running == made.fleet._running == 0
        assert made.fleet._pages == {} and made.services[1].jobs == []


@pytest.mark.long
def test_what_a_request_held_is_freed_without_a_collection_of_garbage():
    """In a process with as many objects as this one that comes seldom, and much is kept till then."""
    with scripted(pages_ahead=0.5) as made:
        service = made.services[1]
        url = f"{made.endpoint.url}/v1/completions"
        ask = {"model": "policy", "prompt": "a b"}
        cases = {
            200: ask | {"stream": True, "n": 2},
            400: ask | {"prompt": "a b " * 150},
            429: ask | {"max_tokens": 160, "stream": True},
        }

        def status(body) -> int:
            request = urllib.request.Request(url, json.dumps(body).encode())
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                    answer.read()
                return answer.status
            except urllib.error.HTTPError as error:
                with error:
                    error.read()
                return error.code

        for _ in range(2):
            gc.collect()
            gc.disable()
            try:
                made.fleet._pages = {}
                assert [status(cases[code]) for code in (200, 400)] == [200, 400]
                made.fleet._pages = {service: 1_000}
                assert status(cases[429]) == 429
                end = time.monotonic() + PATIENCE_S
                while (left := held()) and time.monotonic() < end:
                    time.sleep(0.01)
                assert left == []
            finally:
                gc.enable()


def held():
    """What there is of requests."""
    kinds = Running, Pending, CompletionExchange, ApiError
    return [type(each) for each in gc.get_objects() if isinstance(each, kinds)]


def test_who_comes_before_the_first_version_is_told_to_come_again():
    with scripted() as made:
        made.fleet.opening = "the deployed version is being loaded"
        assert made.fleet.not_ready == "the deployed version is being loaded"
        with pytest.raises(openai.InternalServerError) as refused:
            said(client_of(made), model="auto")
        assert refused.value.status_code == 503
        assert refused.value.response.headers["retry-after"] == "1"
        made.fleet.opening = ""
        assert said(client_of(made)) == "one"
