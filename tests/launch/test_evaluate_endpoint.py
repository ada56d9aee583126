"""A served model is judged with our tasks, tools and graders: a server that the test writes, and our
own with a tiny random model.
"""

from __future__ import annotations

import gzip
import http.server
import json
import threading

import pytest

from configs import repositories
from launch import evaluate_endpoint
from rl_code.evaluation import suite as suite_lib
from rl_code.evaluation.endpoint import EndpointError, Server
from rl_code.read_config import build
from rl_code.run_config import RunConfig
from rl_code.tasks.api import find_source
from tests.rl_code.serving.conftest import served  # noqa: F401


class Scripted:
    """A server that answers with what ``say`` makes of a request: a message, or (status, error)."""

    def __init__(self, say):
        self.requests = []
        own = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                own.requests.append((self.path, self.headers["Authorization"], request))
                said = say(request)
                if isinstance(said, tuple):
                    status, body = said
                else:
                    status = 200
                    usage = {"prompt_tokens": 90, "completion_tokens": 10, "total_tokens": 100}
                    body = {"choices": [{"message": said}], "usage": usage}
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def calls(*pairs):
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for n, (name, arguments) in enumerate(pairs)
        ],
    }


def config_of(count=2, samples=2, **changes) -> RunConfig:
    settings = repositories.get_config("smoke")
    settings.suites[0].update(count=count, samples=samples)
    settings.sft = None
    settings.tools = ("grep", "read_file", "edit_file", "run_tests", "submit")
    settings.update(changes)
    return build(RunConfig, settings)


def play(config, url, tmp_path, **server):
    return evaluate_endpoint.play(
        config, config.suites[0], Server(url, "m", pause_s=0.0, **server), "m", tmp_path
    )


def solution(request):
    """Reads the failing module, writes the reference of the task, tests it and submits."""
    text = request["messages"][0]["content"]
    tasks = find_source(config_of().suites[0].tasks, "tasks").load(None, None)[:2]
    (task,) = [task for task in tasks if task.messages[0]["content"] == text]
    said = sum(message["role"] == "assistant" for message in request["messages"])
    if said == 0:
        arguments = json.dumps({"path": task.path})
        return calls(("read_file", arguments), ("grep", json.dumps({"pattern": "def"})))
    if said == 1:
        assert task.entry_point in request["messages"][2]["content"]
        ((path, right),) = task.reference.items()
        pairs = zip(task.files[path].splitlines(), right.splitlines(), strict=True)
        ((old, new),) = [pair for pair in pairs if pair[0] != pair[1]]
        edit = json.dumps({"path": path, "old": old, "new": new})
        return calls(("edit_file", edit), ("run_tests", "{}"))
    return calls(("submit", ""))


def test_a_server_that_solves_the_tasks_is_judged_so(tmp_path):
    with Scripted(solution) as server:
        result = play(config_of(), server.url, tmp_path, key="secret")
    assert [(task.n, task.correct, task.malformed) for task in result.tasks] == [(2, 2, 0)] * 2
    assert result.pass_at(1) == [1.0, 1.0] and result.tasks[0].mean_tokens == 30
    path, key, request = server.requests[0]
    assert path == "/v1/chat/completions" and key == "Bearer secret"
    assert request["model"] == "m" and request["max_tokens"] == 64
    names = [tool["function"]["name"] for tool in request["tools"]]
    assert names == ["grep", "read_file", "edit_file", "run_tests", "submit"]
    file = tmp_path / "evaluations" / "held_out.m.messages.jsonl.gz"
    lines = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    assert len(lines) == 4 and all(line["solved"] for line in lines)
    result.save(tmp_path)
    assert suite_lib.load_all(tmp_path) == [result]


@pytest.mark.parametrize(
    ("message", "malformed"),
    [
        ({"role": "assistant", "content": "I think it is fine."}, 1),
        (calls(("no_tool", "{}")), 1),
        (calls(("read_file", "{not json")), 1),
        (calls(("read_file", "[]"), ("read_file", '{"path": 3}')), 2),
    ],
)
def test_what_cannot_be_carried_out_is_answered_and_counted(tmp_path, message, malformed):
    with Scripted(lambda request: message) as server:
        config = config_of(count=1, samples=1)
        result = play(config, server.url, tmp_path)
    (task,) = result.tasks
    assert (task.n, task.correct, task.malformed) == (1, 0, malformed * config.limits.turns)
    *_, (_, _, last) = server.requests
    answers = {m["role"] for m in last["messages"][1:]} - {"assistant"}
    assert answers == ({"tool"} if message.get("tool_calls") else {"user"})


def test_faults_of_the_server_are_tried_again_and_never_count_as_failures(tmp_path):
    seen = []

    def flaky(request):
        seen.append(request)
        return (503, {"error": {"message": "busy"}}) if len(seen) % 3 else solution(request)

    with Scripted(flaky) as server:
        result = play(config_of(count=1, samples=1), server.url, tmp_path)
    assert result.tasks[0].correct == 1 and len(seen) == 9


@pytest.mark.parametrize(
    ("said", "word"),
    [
        ((401, {"error": {"message": "wrong key", "code": "invalid_api_key"}}), "wrong key"),
        ((500, {"error": {"message": "broken"}}), "500: broken"),
        ((200, {"choices": []}), "no chat completion"),
    ],
)
def test_a_server_that_refuses_ends_the_evaluation(tmp_path, said, word):
    with Scripted(lambda request: said) as server, pytest.raises(EndpointError, match=word):
        play(config_of(count=1, samples=1), server.url, tmp_path)


def test_a_server_that_is_not_there_is_named(tmp_path):
    with pytest.raises(EndpointError, match="does not answer for the model 'm'"):
        play(config_of(count=1, samples=1), "http://127.0.0.1:9/v1", tmp_path)


@pytest.mark.long
def test_our_own_endpoint_is_judged_like_any_other(tmp_path, served):  # noqa: F811
    endpoint, _, records = served
    before = len(records)
    settings = repositories.get_config("smoke")
    settings.suites[0].update(count=1, samples=2)
    settings.limits.update(turns=2, tokens=1500)
    settings.tools = ("grep", "submit")
    settings.sft = None
    config = build(RunConfig, settings)
    server = Server(f"{endpoint.url}/v1", "tiny")
    result = evaluate_endpoint.play(config, config.suites[0], server, "tiny", tmp_path)
    (task,) = result.tasks
    assert (task.n, task.correct, task.faults) == (2, 0, 0)
    played = records[before:]
    assert len(played) == 4  # two messages of each episode
    assert task.mean_tokens * 2 == sum(len(record.tokens) for record in played)
