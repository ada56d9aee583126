"""Environments of the package verifiers play tasks through the endpoint; what is sampled is written by
the test.

The driver is tested with a stand-in for the package, and in long tests with the package: that of
VERIFIERS_PYTHON=path/to/python, or one that is installed for them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from configs import verifiers as config_file
from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError, build
from rl_code.harness import verifiers as verifiers_lib
from rl_code.harness.agent import HarnessError
from rl_code.harness.harness import Harness
from rl_code.harness.verifiers import EnvironmentHost, Verifiers
from rl_code.metrics.values import read_metrics
from rl_code.run.config import RunConfig
from rl_code.tasks.api import find_source
from rl_code.tasks.row_files import TaskFileError
from rl_code.train import train
from tests import programs
from tests.rl_code.harness.chats import LIMITS, agent_episode, call, chat_tokenizer, say

ENVIRONMENTS = Path(__file__).with_name("environments")
REQUIREMENT = EnvironmentHost.requirement
INSTALL_S = 300
REWARD = ("tests", dict(name="score", weight=2.0))


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory) -> str:
    """A Python that has the stand-in."""
    script = tmp_path_factory.mktemp("python") / "python"
    folder = ENVIRONMENTS / "stand_in"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}" exec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    return str(script)


def rows_of(python, taskset="sums", folder="", **settings):
    settings = dict(taskset=taskset, python=python, folder=folder, **settings)
    return find_source(Named("verifiers", settings), "config.tasks").load(None, None)


@pytest.fixture(scope="session")
def package() -> str:
    """A Python that has the package. Where there is none, uv installs it, in seconds, and it stays
    for the next run.
    """
    if python := os.environ.get("VERIFIERS_PYTHON"):
        return python
    folder = programs.ROOT / ".jax_cache" / REQUIREMENT
    python, whole = str(folder / "bin" / "python"), folder / "installed"
    if whole.exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    uv = folder / "uv"
    for command in (
        [sys.executable, "-m", "venv", "--without-pip", str(folder)],
        [sys.executable, "-m", "pip", "install", "-q", f"--target={uv}", "uv"],
        [str(uv / "bin" / "uv"), "pip", "install", "-q", "--python", python, REQUIREMENT],
    ):
        try:
            done = subprocess.run(
                command, check=False, capture_output=True, text=True, timeout=INSTALL_S
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"{REQUIREMENT} was not installed within {INSTALL_S} s")
        if done.returncode:
            pytest.skip(f"{REQUIREMENT} cannot be installed here: {done.stderr.strip()[-300:]}")
    whole.touch()
    return python


class ListingHost(EnvironmentHost):
    """Lists tasks too, and stays when who uses it is closed: importing the package takes seconds."""

    driver = Path(__file__).with_name("listing_driver.py")

    def listed(self, python, place):
        answers = queue.Queue()
        job = SimpleNamespace(place=place, base_url="", api_key="", model="")
        self.start(job, answers.put)
        return answers.get()

    def describe(self, job):
        return {"place": job.place} if hasattr(job, "place") else super().describe(job)

    def ending(self, said):
        return said["listed"] if "listed" in said else super().ending(said)

    def close(self):
        pass


@pytest.fixture(scope="module")
def host(package):
    made = ListingHost(package)
    yield made
    EnvironmentHost.close(made)


@pytest.fixture
def one_process(host, monkeypatch):
    """All tasks of the package are listed and played by one process."""
    monkeypatch.setattr(verifiers_lib, "listed", host.listed)
    monkeypatch.setattr(verifiers_lib, "EnvironmentHost", lambda python: host)


@pytest.fixture
def real_rows(package, one_process):
    """Tasks of the environments of these tests, of the package's own."""

    def rows(taskset="sums", episodes=(), **settings):
        """episodes: settings of env that say what happens in an episode, but not which tasks there
        are.
        """
        found = rows_of(package, taskset, str(ENVIRONMENTS), **settings)
        return [in_environment(task, **dict(episodes)) for task in found]

    return rows


def in_environment(task, **env):
    """The task with other settings of its environment."""
    place = task.meta["verifiers"]
    return dataclasses.replace(
        task, meta={**task.meta, "verifiers": {**place, "env": {**place["env"], **env}}}
    )


@pytest.fixture(scope="module")
def harness():
    """One for all tests: a process for each Python imports the package once."""
    made = Harness(Verifiers())
    yield made
    made.close()


@pytest.fixture
def play(harness, sandboxes):
    """Plays a task with written answers: (trajectory, what followed each answer, the episode)."""
    opened = []

    def run(task, answers, **limits):
        changed = dataclasses.replace(LIMITS, **limits)
        episode = agent_episode(task, sandboxes, harness, limits=changed, reward=REWARD)
        opened.append(episode)
        followed = [chat_tokenizer().decode(episode.start())]
        for answer in answers:
            tokens = say(episode, f"{answer}<|im_end|>")
            followed.append(tokens and chat_tokenizer().decode(tokens))
        return episode.finish(), followed, episode

    yield run
    for episode in opened:
        episode.close()


def kind(does="play", **taskset):
    """Settings of the stand-in's taskset."""
    return dict(env=dict(taskset=dict(does=does, **taskset)))


def test_an_environment_plays_and_says_what_it_is_worth(stand_in, play):
    tasks = rows_of(os.path.relpath(stand_in))  # from here, wherever the driver runs
    assert [task.id for task in tasks] == [f"sums/row-{n}" for n in range(3)]
    assert tasks[1].messages == ({"role": "user", "content": "1 + 2 = ?"},)
    trajectory, (prompt, hint, end), _ = play(tasks[1], ["5", "3"])
    assert "1 + 2 = ?" in prompt and "less" in hint and end is None
    assert (trajectory.status, trajectory.solved) == ("submitted", True)
    assert trajectory.scores == {"right": 1.0, "reward": 1.0, "guesses": 2.0, "failed": 0.0}
    assert trajectory.reward.components == {"tests": 1.0, "score": 2.0}
    (context,) = trajectory.contexts
    said = [chat_tokenizer().encode(f"{n}<|im_end|>") for n in (5, 3)]
    assert context.tokens[context.sampled].tolist() == said[0] + said[1]
    assert (context.versions[context.sampled] == 3).all()


@pytest.mark.parametrize(
    ("limits", "status"), [(dict(turns=2), "turn_limit"), (dict(tokens=80), "token_limit")]
)
def test_an_episode_that_reaches_a_limit_is_scored(stand_in, play, limits, status):
    numbers = {"turn_limit": ["7", "6"], "token_limit": ["7" * 12] * 2}[status]
    trajectory, *_ = play(rows_of(stand_in)[0], numbers, **limits)
    assert (trajectory.status, trajectory.solved) == (status, False)
    assert trajectory.scores["reward"] == 0.25 and trajectory.scores["guesses"] == 2.0
    assert trajectory.reward.components == {"tests": 0.0, "score": 0.5}


@pytest.mark.parametrize(
    ("does", "cause"),
    [
        ("exit", "killed"),
        ("raise", "KeyError: 'its own bug'"),
        ("SandboxError", "SandboxError: its words"),
    ],
)
def test_an_episode_without_a_result_is_a_fault(stand_in, play, does, cause):
    trajectory, _, episode = play(rows_of(stand_in, **kind(does))[0], ["1"])
    assert (trajectory.status, trajectory.reward.flags) == ("fault", ("fault",))
    assert cause in episode._cause and trajectory.scores is None


@pytest.mark.parametrize("does", ["TaskError", "EnvError", "HarnessError", "no number"])
def test_a_failure_that_the_policy_can_bring_about_is_worth_what_the_config_says(
    stand_in, play, does
):
    (task, *_) = rows_of(stand_in, failed_reward=-0.5, **kind(does))
    trajectory, *_ = play(task, ["1"])
    assert (trajectory.status, trajectory.solved) == ("submitted", False)
    assert (trajectory.scores["failed"], trajectory.scores["reward"]) == (1.0, -0.5)
    assert trajectory.reward.components["score"] == -1.0


def test_a_program_that_ends_over_a_limit_is_scored_and_one_over_the_endpoint_is_a_fault(
    stand_in, play
):
    trajectory, *_ = play(rows_of(stand_in, **kind("ProviderError 400"))[0], ["1"])
    assert (trajectory.status, trajectory.scores["reward"]) == ("submitted", 0.0)
    trajectory, *_ = play(rows_of(stand_in, **kind("ProviderError 503"))[0], ["1"])
    assert trajectory.status == "fault"


def has_ended(process, within_s=60.0):
    """True if a process that may be another one's child ends in time, its parent told or not."""
    deadline = time.monotonic() + within_s
    while True:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.01)
                continue
        return True


def test_servers_of_tools_serve_all_episodes_and_are_started_again_when_gone(stand_in, sandboxes):
    (task, *_) = rows_of(stand_in, **kind("share"))
    with contextlib.closing(Harness(Verifiers())) as harness:

        def server_of_an_episode():
            with contextlib.closing(agent_episode(task, sandboxes, harness)) as episode:
                episode.start()
                say(episode, "1<|im_end|>")
                return psutil.Process(int(episode.finish().scores["server"]))

        first = server_of_an_episode()
        assert server_of_an_episode() == first
        first.kill()
        assert has_ended(first)
        second = server_of_an_episode()
        assert second != first and not has_ended(second, within_s=0.0)
    assert has_ended(second)


def test_servers_of_tools_that_do_not_start_are_named(stand_in, play):
    with pytest.raises(HarnessError, match=r"did not start: OSError\('no port is free'\)"):
        play(rows_of(stand_in, **kind("share nothing"))[0], [])


def test_one_that_hangs_is_ended_and_worth_nothing(stand_in, play):
    trajectory, *_ = play(rows_of(stand_in, **kind("hang"))[0], ["1"], tools_s=3.0)
    assert (trajectory.status, trajectory.scores) == ("time_limit", None)
    assert trajectory.reward.components["score"] == 0.0


def test_what_cannot_be_played_is_named(stand_in, harness, sandboxes, task):
    for settings, message in (
        (dict(select=dict(skip=9)), "no task of it is selected by select={'skip': 9}"),
        (dict(taskset="products"), "tasks.taskset = 'products': .*not found"),
        (kind(rows=-1), "its tasks never end: say how many with select.limit"),
        (
            dict(env=dict(agent=dict(harness=dict(id="bash")))),
            "'bash' would run the policy's commands on this machine: give env.agent.runtime",
        ),
    ):
        with pytest.raises(TaskFileError, match=message):
            rows_of(stand_in, **settings)
    with pytest.raises(TaskFileError, match=r"tasks.python = 'no_such_python' cannot be started"):
        rows_of("no_such_python")
    with pytest.raises(TaskFileError, match=r"pip install verifiers==0.4.0"):
        rows_of(sys.executable)
    with pytest.raises(ValueError, match=r"env=.* is no JSON"):
        rows_of(stand_in, env=dict(taskset=dict(does=print)))
    episode = agent_episode(task, sandboxes, harness)
    with pytest.raises(HarnessError, match="is of no environment of verifiers"):
        episode.start()
    episode.close()


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (dict(taskset=dict(rows=2)), "it had a task 2 when tasks were listed, and has 2 now"),
        (dict(taskset=dict(does="judge")), "its role 'agent' is not to be trained"),
    ],
)
def test_an_environment_that_cannot_begin_ends_the_run(stand_in, harness, sandboxes, env, message):
    (*_, last) = rows_of(stand_in)
    episode = agent_episode(in_environment(last, **env), sandboxes, harness)
    with pytest.raises(HarnessError, match=message):
        episode.start()
    episode.close()


def smoke(python, **tasks):
    config = config_file.get_config("smoke")
    config.model.preset = "tests.models.small:NARROW"
    for section in (config.tasks, config.suites[0]["tasks"]):
        section.update(python=python, **tasks)
    return config


@pytest.mark.long
@pytest.mark.usefixtures("traced_once")
def test_a_run_trains_on_an_environment(stand_in, tmp_path):
    config = smoke(stand_in, taskset="sums", folder="")
    config.suites = ()  # the stand-in has no other split
    train(build(RunConfig, config), tmp_path)
    rows = read_metrics(tmp_path)
    assert len(rows) == 2
    for row in rows:
        assert row["scores/reward"] == row["reward/total"] > 0
        assert row["episode/faults"] == row["scores/failed"] == 0


def test_tasks_of_an_environment_need_its_harness():
    config = config_file.get_config("smoke")
    config.harness = "mini_swe_agent"
    with pytest.raises(ConfigError, match=r"only with config.harness = 'verifiers'"):
        build(RunConfig, config)


@pytest.mark.long
def test_a_single_turn_of_the_package_is_scored(play, real_rows, monkeypatch):
    encoded = []
    encode = type(chat_tokenizer()).encode
    monkeypatch.setattr(
        type(chat_tokenizer()),
        "encode",
        lambda self, text: encoded.append(text) or encode(self, text),
    )
    tasks = real_rows()
    for answer, reward in (("3", 1.0), ("4", 0.25), ("three", 0.0), ("", 0.0)):
        trajectory, (prompt, end), _ = play(tasks[1], [answer])
        assert "Answer with a number." in prompt and "1 + 2 = ?" in prompt and end is None
        assert (trajectory.status, trajectory.solved) == ("submitted", reward == 1.0)
        # the weight is the task's, the rest is told as it is
        assert trajectory.scores["correct"] == reward and trajectory.scores["turns"] == 1.0
        assert trajectory.scores["reward"] == 2 * reward and trajectory.scores["failed"] == 0.0
        assert trajectory.reward.components["score"] == 4 * reward
        (context,) = trajectory.contexts
        assert context.sampled.sum() == len(encode(chat_tokenizer(), f"{answer}<|im_end|>"))
    # each prompt once, and what the test itself wrote
    assert sum("1 + 2 = ?" in text for text in encoded) == 4


@pytest.mark.long
def test_tools_of_the_package_are_called(play, real_rows):
    (task, *_) = real_rows(episodes=dict(taskset=dict(task=dict(tools=True))))
    body = '{"name": "adding_add", "arguments": {"a": 0, "b": 1}}'
    bad = '{"name": "adding_add", "arguments": {"a": "x"}}'
    said = [f"<tool_call>\n{one}\n</tool_call>" for one in (body, bad)]
    trajectory, (prompt, result, wrong, end), episode = play(task, [*said, "1"])
    assert '"name": "adding_add"' in prompt and "<tool_response>\n1\n</tool_response>" in result
    assert "rror" in wrong and end is None
    assert (trajectory.status, trajectory.solved) == ("submitted", True)
    assert trajectory.scores["turns"] == 3.0
    # one context: the history went on word by word, and nothing of it was tokenised again
    (context,) = trajectory.contexts
    assert episode.session.whole(0) == context.tokens.tolist()
    calls = [call for turn in trajectory.turns for call in turn.calls]
    assert [call.name for call in calls] == ["adding_add"] * 2


# Tasks that no run trains on, without the first of them.
EVALUATED = dict(env=dict(taskset=dict(split="eval")), select=dict(skip=1))


@pytest.mark.long
def test_an_environment_of_several_turns_plays(play, real_rows):
    (task, *_) = real_rows("guessed_sums", dict(guesses=3), **EVALUATED)
    a, b = map(int, task.id.partition("/")[2].split("+"))
    answers = [str(a + b + 2), "what", str(a + b)]
    trajectory, (prompt, less, again, end), episode = play(task, answers)
    assert f"{a}+{b}=" in prompt and "less" in less and "number?" in again and end is None
    # a distance of 2 at once, or the sum at the third guess
    best = max(0.1 + 0.6 * 0.8, 0.8**2)
    assert trajectory.scores["reward"] == pytest.approx(best)
    assert trajectory.scores["guesses"] == 3.0
    (context,) = trajectory.contexts
    assert episode.session.whole(0) == context.tokens.tolist()


@pytest.mark.long
def test_commands_of_a_rollout_run_in_the_sandbox_of_its_episode(play, real_rows):
    agent = dict(harness=dict(id="in_process", bash=True))
    (task, *_) = real_rows("written_files", dict(agent=agent))
    command = "echo $((6*7)) > answer.txt; cat given.txt; ls / | wc -l; test -e " + str(
        ENVIRONMENTS
    )
    told = call(command).removesuffix("<|im_end|>")
    trajectory, (prompt, result, end), _ = play(task, [told, "done"])
    assert '"name": "bash"' in prompt and "a secret of 70000 bytes" in result and end is None
    assert (trajectory.status, trajectory.scores["reward"]) == ("submitted", 1.0)
    # what tests/rl_code/harness/environments has is on this machine, and not in there
    assert trajectory.scores["seen"] == 0.0 and trajectory.scores["read"] == 70024.0


@pytest.mark.long
@pytest.mark.parametrize(
    ("limits", "status"), [(dict(turns=1), "submitted"), (dict(tokens=70), "token_limit")]
)
def test_the_package_scores_what_a_limit_ended(play, real_rows, limits, status):
    (task, *_) = real_rows("guessed_sums", dict(guesses=5), **EVALUATED)
    answers = ["777777777777"] * (1 if status == "submitted" else 2)
    trajectory, *_ = play(task, answers, **limits)
    assert (trajectory.status, trajectory.solved) == (status, False)
    assert trajectory.scores["reward"] == pytest.approx(0.1)


@pytest.mark.long
@pytest.mark.parametrize("does", ["raise", "nan"])
def test_a_reward_of_the_package_that_fails_is_counted(play, real_rows, does):
    episodes = dict(taskset=dict(task=dict(does=does)))
    trajectory, *_ = play(real_rows(episodes=episodes)[0], ["1"])
    assert (trajectory.status, trajectory.scores["failed"]) == ("submitted", 1.0)
    assert trajectory.scores["reward"] == 0.0


@pytest.mark.long
def test_an_environment_of_the_package_that_dies_is_a_fault(play, real_rows):
    episodes = dict(taskset=dict(task=dict(does="exit")))
    trajectory, _, episode = play(real_rows(episodes=episodes)[0], ["1"])
    assert trajectory.status == "fault" and "killed" in episode._cause


class Gym(http.server.BaseHTTPRequestHandler):
    """As much of a resource server of NeMo Gym as an episode asks for: it adds, and verifies."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/verify":
            (*_, last) = body["response"]["output"]
            right = last["content"][0]["text"] == body["answer"]
            said = body | {"reward": float(right), "calls": len(body["response"]["output"]) - 1}
        else:
            said = {"sum": body["a"] + body["b"]} if self.path == "/add" else {}
        data = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format, *args):
        pass


@pytest.mark.long
def test_a_task_of_nemo_gym_is_played_and_verified_by_its_server(play, real_rows, tmp_path):
    number = {"type": "integer"}
    parameters = {"type": "object", "properties": {"a": number, "b": number}}
    tool = {"type": "function", "name": "add", "description": "Adds.", "parameters": parameters}
    asked = {"input": [{"role": "user", "content": "2 + 3 = ?"}], "tools": [tool]}
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"responses_create_params": asked, "answer": "5"}))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gym)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        taskset = dict(dataset=str(rows), task=dict(resources_url=url))
        (task,) = real_rows("nemo_gym", env=dict(taskset=taskset))
        body = '{"name": "add", "arguments": {"a": 2, "b": 3}}'
        said = [f"<tool_call>\n{body}\n</tool_call>", "5"]
        trajectory, (prompt, result, end), _ = play(task, said)
    finally:
        server.shutdown()
        server.server_close()
    assert '"name": "add"' in prompt and '"sum": 5' in result and end is None
    assert (trajectory.status, trajectory.solved) == ("submitted", True)
    assert (trajectory.scores["nemo_gym"], trajectory.scores["calls"]) == (1.0, 2.0)


@pytest.mark.long
def test_a_task_of_openenv_is_played_by_its_server(package, play, real_rows):
    has = subprocess.run([package, "-c", "import openenv"], check=False, capture_output=True)
    if has.returncode:
        pytest.skip("needs openenv==0.10.0 beside verifiers: VERIFIERS_PYTHON=path/to/python")
    program = [package, "-P", str(ENVIRONMENTS / "open_sums.py")]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            taskset = dict(base_url=url, resets=[dict(seed=3), dict(seed=4)])
            *_, task = real_rows("openenv", env=dict(taskset=taskset))
            trajectory, (prompt, hint, end), _ = play(task, ["7", '{"number": 9}'])
        finally:
            server.terminate()
    assert "4 + 5 = ?" in prompt and "more" in hint and end is None
    assert (trajectory.status, trajectory.scores["openenv_reward"]) == ("submitted", 0.75)


@pytest.mark.long
def test_what_the_package_refuses_is_named(real_rows):
    for settings, message in (
        (dict(taskset="no_such_taskset"), "no_such_taskset.* not found"),
        (dict(env=dict(taskset=dict(split=1))), "split"),
        (dict(env=dict(agent=dict(harness=dict(id="bash")))), "policy's commands on this machine"),
    ):
        with pytest.raises(TaskFileError, match=message):
            real_rows(**settings)


@pytest.mark.long
def test_tasks_of_the_package_are_listed_by_a_process_of_its_own(package, host, monkeypatch):
    alone = rows_of(package, "guessed_sums", str(ENVIRONMENTS), **EVALUATED)
    monkeypatch.setattr(verifiers_lib, "listed", host.listed)
    assert rows_of(package, "guessed_sums", str(ENVIRONMENTS), **EVALUATED) == alone
    assert len(alone) == 19


@pytest.mark.long
@pytest.mark.usefixtures("traced_once", "one_process")
def test_a_run_trains_on_an_environment_of_the_package(package, tmp_path):
    train(build(RunConfig, smoke(package)), tmp_path)
    rows = read_metrics(tmp_path)
    assert len(rows) == 2 and all("scores/closeness" in row for row in rows)
