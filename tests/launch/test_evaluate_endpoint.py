"""A served model is judged with our tasks, tools and graders: a server that the test writes, and our
own with a tiny random model.
"""

from __future__ import annotations

import dataclasses
import gzip
import http.server
import json
import threading

import pytest
from absl.testing import flagsaver

from configs import repositories
from launch import evaluate, evaluate_endpoint
from rl_code.config.read_config import ConfigError, build
from rl_code.evaluation import suite as suite_lib
from rl_code.evaluation.endpoint import EndpointError, Server
from rl_code.run.config import RunConfig
from rl_code.tasks.api import find_source
from tests.people.serving.conftest import served  # noqa: F401
from tests.rl_code.harness.chats import mini_python, minimal


@pytest.fixture(autouse=True)
def parsed():
    if not evaluate.FLAGS.is_parsed():
        evaluate.FLAGS(["evaluate"])


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
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

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


def main(config, url, workdir, **flags):
    """``launch.evaluate`` with these flags."""
    given = dict(suite="held_out", endpoint=url, endpoint_model="m") | flags
    with flagsaver.as_parsed(**given):
        evaluate.main(config, str(workdir))


def settings_of(**changes):
    """The config with two tasks of HumanEval, which are its training tasks, too."""
    settings = repositories.get_config("smoke")
    settings.sft = None
    # nothing is tokenised, and these tasks have no demonstrations to train a tokenizer on
    settings.tokenizer = dict(path="tokenizer.json")
    settings.tasks = dict(name="humaneval", form="agent")
    suite = dict(name="held_out", tasks=settings.tasks, count=2, samples=4)
    settings.suites = (suite | changes,)
    return settings


def test_a_served_model_gets_the_curve_the_predictions_and_the_contamination(tmp_path, capsys):
    with Scripted(lambda request: calls(("submit", "{}"))) as server:
        main(
            settings_of(),
            server.url,
            tmp_path,
            contamination="true",
            predictions=str(tmp_path / "predictions.jsonl"),
        )
    said = capsys.readouterr().out
    rows = [line for line in said.splitlines() if line.startswith(("│ 1 │", "│ 2 │", "│ 4 │"))]
    assert len(rows) == 3 and "pass@k in %" in said  # the curve
    assert "2 of 2 tasks are among the training tasks" in said and "the same id" in said
    files = sorted(path.name for path in tmp_path.glob("predictions*"))
    assert files == [*(f"predictions.{n}.jsonl" for n in (1, 2, 3)), "predictions.jsonl"]
    rows = [json.loads(line) for line in (tmp_path / files[-1]).read_text().splitlines()]
    assert [row["instance_id"] for row in rows] == ["HumanEval/0", "HumanEval/1"]
    assert {row["model_name_or_path"] for row in rows} == {"m"}


def test_a_served_model_is_compared_with_a_saved_result(tmp_path, capsys):
    config = settings_of(samples=1)
    with Scripted(lambda request: calls(("submit", "{}"))) as server:
        main(config, server.url, tmp_path / "before")
        asked = len(server.requests)
        for against in ("before", "before/evaluations/held_out.m.json"):
            main(config, server.url, tmp_path / "after", against=str(tmp_path / against))
            said = capsys.readouterr().out
            assert "tasks gained" in said and f"before: {tmp_path / against}, m; after:" in said
        assert len(server.requests) == 3 * asked


@pytest.mark.parametrize(
    ("against", "message"),
    [
        ("start", "--against=start: name a saved result of the suite held_out; .* has none"),
        ("{}/none.json", "--against=.*No such file"),
        ("{}", "--against: held_out.other is not on the tasks .* only one of them has HumanEval/1"),
    ],
)
def test_what_a_served_model_cannot_be_compared_with_is_refused_before_it_is_asked(
    tmp_path, against, message
):
    task = suite_lib.TaskResult("HumanEval/0", 1, 0, None, 0, 1.0)
    suite_lib.SuiteResult("held_out", "other", 0, {}, (task,)).save(tmp_path)
    with Scripted(lambda request: calls(("submit", "{}"))) as server:
        with pytest.raises(ConfigError, match=message):
            main(settings_of(), server.url, tmp_path / "new", against=against.format(tmp_path))
        assert server.requests == []


@pytest.mark.parametrize(
    ("changes", "flags", "message"),
    [
        ({}, {"step": "3"}, "--step is that of a run's checkpoint"),
        ({"sampling": {"top_k": 5}}, {}, "sampling.top_k=5, which the chat API has no place for"),
        ({"count": 1000}, {}, "suite held_out: count=1000, but only 164 tasks are there"),
    ],
)
def test_what_a_served_model_has_no_use_for_is_refused(tmp_path, changes, flags, message):
    with Scripted(lambda request: calls(("submit", "{}"))) as server:
        with pytest.raises(ConfigError, match=message):
            main(settings_of(**changes), server.url, tmp_path, **flags)
        assert server.requests == []


def test_a_server_is_told_which_results_are_documents(tmp_path):
    settings = settings_of()
    with settings.ignore_type():
        settings.documents = {}
        settings.tools = ("write_file", "read_file", "submit")

    def look(request):
        if len(request["messages"]) > 2:
            return calls(("submit", "{}"))
        paths = ("there.py", "none.py")
        looks = [("read_file", json.dumps({"path": path})) for path in paths]
        return calls(("write_file", json.dumps({"path": paths[0], "content": "x = 1\n"})), *looks)

    with Scripted(look) as server:
        main(settings, server.url, tmp_path)
        *_, (_, _, last) = server.requests
        told = [one for one in last["messages"] if one["role"] == "tool"]
    kinds = [part["type"] for one in told[:3] for part in one["content"]]
    assert kinds == ["text", "document", "text"]  # what failed is about the call


def bash(*commands):
    """A message that calls the tool of the agent of others."""
    return calls(*(("bash", json.dumps({"command": command})) for command in commands))


def mend(request):
    """Writes the reference of the task by a command of that agent, and hands in."""
    messages = request["messages"]
    tasks = find_source(config_of().suites[0].tasks, "tasks").load(None, None)[:2]
    asked = [message["content"] for message in messages if message["role"] == "user"]
    (task,) = [task for task in tasks if task.messages[0]["content"] == asked[0]]
    if messages[-1]["role"] == "user":
        ((path, right),) = task.reference.items()
        return bash(f"cat > {path} <<'EOF'\n{right}\nEOF")
    assert messages[-1]["content"].endswith("exit 0")
    # mini-swe-agent has a system message, the program of the tests has none
    ends = {"system": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}
    return bash(ends.get(messages[0]["role"], "submit"))


def test_an_agent_of_others_plays_with_a_served_model(tmp_path):
    """It offers its own tool, not ours, and its commands change the workspace that is graded."""
    config = config_of(harness=program())
    predictions = tmp_path / "predictions.jsonl"
    suite = config.suites[0]
    with Scripted(mend) as server:
        served = Server(server.url, "m", pause_s=0.0, key="secret")
        result = evaluate_endpoint.play(config, suite, served, "m", tmp_path, predictions)
    assert [(task.n, task.correct, task.malformed) for task in result.tasks] == [(2, 2, 0)] * 2
    assert result.tasks[0].mean_tokens == 20 and result.tasks[0].calls == 4
    for path, key, request in server.requests:
        assert (path, key) == ("/v1/chat/completions", "Bearer secret")
        assert [tool["function"]["name"] for tool in request["tools"]] == ["bash"]
        assert request["model"] == "m" and request["max_tokens"] == 64
        assert request["temperature"] == suite.sampling.temperature
    assert "diff --git" in json.loads(predictions.read_text().splitlines()[0])["model_patch"]
    file = tmp_path / "evaluations" / "held_out.m.messages.jsonl.gz"
    line = json.loads(gzip.decompress(file.read_bytes()).splitlines()[0])
    roles = [message["role"] for message in line["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant"] and line["earlier"] == []


@pytest.mark.skipif(mini_python() is None, reason="no Python with mini-swe-agent")
def test_the_package_mini_swe_agent_plays_with_a_served_model(tmp_path):
    templates = dict(
        system="Call bash.", instance="{{task}}", observation="exit {{output.returncode}}"
    )
    harness = dict(name="mini_swe_agent", python=mini_python(), **templates)
    with Scripted(mend) as server:
        result = play(config_of(harness=harness), server.url, tmp_path)
    assert [(task.n, task.correct) for task in result.tasks] == [(2, 2)] * 2


def program(*options):
    return dict(name="program", command=minimal(*options).command)


def test_a_history_that_an_agent_rewrites_is_on_record(tmp_path):
    config = config_of(count=1, samples=1, harness=program("tools", "forgetful"))
    said = iter([bash("echo 1"), bash("echo 2"), bash("submit")])
    with Scripted(lambda request: next(said)) as server:
        play(config, server.url, tmp_path)
    file = tmp_path / "evaluations" / "held_out.m.messages.jsonl.gz"
    line = json.loads(gzip.decompress(file.read_bytes()))
    assert line["status"] == "submitted" and not line["solved"]
    assert [len(each) for each in line["earlier"]] == [4] and len(line["messages"]) == 4


@pytest.mark.parametrize(
    ("limits", "said", "status"),
    [
        (dict(turns=2), bash("true"), "turn_limit"),
        (dict(tokens=100), bash("true"), "token_limit"),
        (
            {},
            (400, {"error": {"message": "long", "code": "context_length_exceeded"}}),
            "token_limit",
        ),
    ],
)
def test_limits_end_an_agent_of_others_that_a_server_answers(tmp_path, limits, said, status):
    config = config_of(count=1, samples=1, harness=program())
    limits = dataclasses.replace(config.limits, **limits)
    config = dataclasses.replace(config, limits=limits)
    config = dataclasses.replace(
        config, suites=(dataclasses.replace(config.suites[0], limits=limits),)
    )
    with Scripted(lambda request: said) as server:
        result = play(config, server.url, tmp_path)
        assert len(server.requests) == (2 if status == "turn_limit" else 1)
    assert result.tasks[0].correct == 0
    file = tmp_path / "evaluations" / "held_out.m.messages.jsonl.gz"
    assert json.loads(gzip.decompress(file.read_bytes()))["status"] == status


def test_a_server_that_fails_ends_an_evaluation_of_an_agent_of_others(tmp_path):
    said = (401, {"error": {"message": "wrong key"}})
    with Scripted(lambda request: said) as server, pytest.raises(EndpointError, match="wrong key"):
        play(config_of(harness=program()), server.url, tmp_path)


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
