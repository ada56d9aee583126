"""Nothing that a model writes raises past the episode, stalls it or takes more than it may."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs import quickstart
from models.tokenizer import Tokenizer
from rl_code.config.read_config import ConfigError, build
from rl_code.environment.episode import Episode
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool
from rl_code.environment.tools.api import find_tools
from rl_code.environment.tools.tool import Result, Tool, function_schema
from rl_code.run.config import RunConfig
from rl_code.types import Limits
from tests.rl_code.signals import rewarder

LIMITS = Limits(turns=4, tokens=60_000, turn_tokens=30_000, test_runs=3, command_s=10.0)
SUBMIT = "<|call|>submit<|end|>"
PENALTY = rewarder("tests", dict(name="malformed", weight=0.125))


def make(task, pool, tokenizer, name="compact", limits=LIMITS, tools=None) -> Episode:
    episode = Episode(
        dataclasses.replace(task, tools=None),
        group=0,
        index=0,
        protocol=PROTOCOLS[name],
        tools=tools or find_tools(),
        tokenizer=tokenizer,
        pool=pool,
        limits=limits,
        reward=PENALTY,
    )
    episode.start()
    return episode


def say(episode: Episode, tokenizer, text: str) -> str | None:
    tokens = tokenizer.encode(text)
    answer = episode.step(tokens, [0.0] * len(tokens), [0] * len(tokens))
    return None if answer is None else tokenizer.decode(answer)


@pytest.fixture(scope="module")
def chat_tokenizer() -> Tokenizer:
    special = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    texts = ["[" * 4000, "1" * 4000, '{"name": "submit", "arguments": {}}'] * 2
    return Tokenizer.train(texts, 400, special, eos="<|im_end|>", pad="<|endoftext|>")


def call(name: Any, arguments: str) -> str:
    return f'<tool_call>{{"name": {json.dumps(name)}, "arguments": {arguments}}}</tool_call>'


@pytest.mark.parametrize(
    "message",
    [
        call("submit", '{"x": ' + "[" * 10_000 + "]" * 10_000 + "}"),
        call("read_file", '{"path": ' + '{"a": ' * 900 + "1" + "}" * 901),
        "<tool_call>" + "[" * 20_000 + "</tool_call>",
        call("read_file", '{"path": "a", "first_line": ' + "9" * 4000 + "}"),
        call("read_file", '{"path": "a", "first_line": ' + "9" * 20_000 + "}"),
        call("read_file", '{"path": "a", "first_line": 1e999}'),
        call("submit", '{"' + "k" * 20_000 + '": 1}'),
        call("x" * 20_000, "{}"),
        call("\ud800", '{"\\ud800": "\\ud800"}'),
        call(3, "{}"),
    ],
)
def test_a_hostile_call_is_malformed_and_no_more(task, pool, chat_tokenizer, message):
    episode = make(task, pool, chat_tokenizer, "hermes")
    answer = say(episode, chat_tokenizer, message + "<|im_end|>")
    assert answer is not None and len(answer) < 1000
    assert say(episode, chat_tokenizer, call("submit", "{}") + "<|im_end|>") is None
    trajectory = episode.finish()
    (malformed,) = trajectory.turns[1].calls
    assert malformed.error and malformed.arguments == {}
    assert trajectory.malformed_calls == 1
    assert trajectory.reward.components == {"tests": 0.0, "malformed": -0.125}


def test_calls_beyond_the_limit_are_counted_and_not_carried_out(task, pool, tokenizer):
    limits = dataclasses.replace(LIMITS, calls=3)
    episode = make(task, pool, tokenizer, limits=limits)
    read = "<|call|>read notes.txt 1 1<|end|>"
    answer = say(episode, tokenizer, read * 500 + SUBMIT + "<|eot|>")
    told = "only the first 3 calls of a message are carried out, not 501"
    assert answer == f"<|tool|>one\n\none\n\none\n\n{told}<|eot|>"
    assert not episode.over and len(episode._frames.first.transcript.turns[1].calls) == 501
    assert say(episode, tokenizer, read * 2 + SUBMIT + "<|eot|>") is None
    trajectory = episode.finish()
    assert trajectory.status == "submitted" and trajectory.malformed_calls == 498


@dataclasses.dataclass(frozen=True)
class Broken(Tool):
    """Raises what it is told to."""

    error: Exception = dataclasses.field(default_factory=ValueError)

    schema: ClassVar = function_schema("broken", "Raises an exception of ours.", {}, ())

    def run(self, arguments, workspace) -> Result:
        raise self.error


@pytest.mark.parametrize(
    "error", [ValueError("no"), OSError("no"), RecursionError("no"), MemoryError("no")]
)
def test_what_a_model_can_provoke_in_a_tool_is_answered(task, pool, tokenizer, error):
    tools = find_tools() | {"broken": Broken(error)}
    episode = make(task, pool, tokenizer, tools=tools)
    answer = say(episode, tokenizer, "<|call|>broken<|end|><|eot|>")
    assert answer == "<|tool|>broken failed: no<|eot|>"
    assert say(episode, tokenizer, SUBMIT + "<|eot|>") is None
    assert episode.finish().status == "submitted"


@pytest.mark.parametrize("error", [KeyError("x"), TypeError("x"), AssertionError("x")])
def test_a_bug_of_a_tool_still_raises(task, pool, tokenizer, error):
    episode = make(task, pool, tokenizer, tools=find_tools() | {"broken": Broken(error)})
    with pytest.raises(type(error)):
        say(episode, tokenizer, "<|call|>broken<|end|><|eot|>")


@pytest.mark.parametrize("error", [OSError("no"), RecursionError("no"), MemoryError("no")])
def test_work_that_breaks_the_grader_fails_every_test(task, pool, tokenizer, monkeypatch, error):
    def grade(*_):
        raise error

    monkeypatch.setattr("rl_code.environment.grading.grade", grade)
    episode = make(task, pool, tokenizer)
    say(episode, tokenizer, "<|call|>fly<|end|><|eot|>")
    say(episode, tokenizer, SUBMIT + "<|eot|>")
    trajectory = episode.finish()
    assert (trajectory.status, trajectory.solved) == ("submitted", False)
    assert trajectory.reward.total == -0.125


def test_a_bug_of_the_grader_still_raises(task, pool, tokenizer, monkeypatch):
    monkeypatch.setattr("rl_code.environment.grading.grade", lambda *_: 1 / 0)
    episode = make(task, pool, tokenizer)
    say(episode, tokenizer, SUBMIT + "<|eot|>")
    with pytest.raises(ZeroDivisionError):
        episode.finish()


def test_files_that_cannot_be_read_in_full_are_not_handed_in(task, pool, tokenizer, monkeypatch):
    episode = make(task, pool, tokenizer)
    write = "<|call|>write\ndef f(x):\n    return x<|end|>"
    say(episode, tokenizer, write + "<|call|>test<|end|><|eot|>")
    (sandbox,) = pool.opened

    def refuse():
        raise ValueError("big.bin: 9 MiB are too much")

    monkeypatch.setattr(sandbox, "snapshot", refuse)
    answer = say(episode, tokenizer, SUBMIT + "<|eot|>")
    assert answer == "<|tool|>submit failed: big.bin: 9 MiB are too much<|eot|>"
    assert not episode.over
    for _ in range(2):
        say(episode, tokenizer, SUBMIT + "<|eot|>")
    trajectory = episode.finish()
    assert (trajectory.status, trajectory.reward.total) == ("turn_limit", 0.0)


def test_wall_clock_time_of_tools_ends_an_episode(task, pool, tokenizer):
    pool.delay_s = 0.15
    limits = dataclasses.replace(LIMITS, tools_s=0.2)
    episode = make(task, pool, tokenizer, limits=limits)
    test = "<|call|>test<|end|>"
    assert say(episode, tokenizer, test + "<|eot|>").startswith("<|tool|>FAIL")
    assert say(episode, tokenizer, test + test + SUBMIT + "<|eot|>") is None
    trajectory = episode.finish()
    contents = [result.content for result in trajectory.turns[-1].results]
    assert contents[0].startswith("FAIL") and contents[1:] == ["the time is used up"] * 2
    assert (trajectory.status, trajectory.reward.total) == ("time_limit", 0.0)
    assert len(pool.graded) == 0


def test_work_that_was_handed_in_is_graded_though_the_time_is_up(task, pool, tokenizer):
    pool.delay_s = 0.15
    episode = make(task, pool, tokenizer, limits=dataclasses.replace(LIMITS, tools_s=0.2))
    write = "<|call|>write\ndef f(x):\n    return [2 * y for y in x]<|end|>"
    assert say(episode, tokenizer, write + "<|call|>test<|end|>" + SUBMIT + "<|eot|>") is None
    trajectory = episode.finish()
    assert (trajectory.status, trajectory.reward.total) == ("submitted", 1.0)


CONFIG = SandboxConfig(
    workers=1, memory_mb=512, processes=16, workspace_mb=8, cpu_s=5, output_bytes=20_000
)


@pytest.fixture(scope="module")
def sandboxes():
    with SandboxPool(CONFIG) as pool:
        yield pool


def test_cpu_time_of_commands_ends_an_episode(task, sandboxes, tokenizer):
    code = "import time\nwhile time.process_time() < 0.5: pass"
    spin = f"<|call|>run\npython -c '{code}'<|end|>"
    for budget, status in ((0.2, "time_limit"), (30.0, "submitted")):
        limits = dataclasses.replace(LIMITS, tools_cpu_s=budget)
        episode = make(task, sandboxes, tokenizer, limits=limits)
        assert (say(episode, tokenizer, spin + "<|eot|>") is None) == (status == "time_limit")
        if not episode.over:
            say(episode, tokenizer, SUBMIT + "<|eot|>")
        assert episode.finish().status == status


def test_a_command_gets_no_more_time_than_the_episode_has_left(task, sandboxes, tokenizer):
    episode = make(task, sandboxes, tokenizer, limits=dataclasses.replace(LIMITS, tools_s=0.7))
    assert say(episode, tokenizer, "<|call|>run\nsleep 9<|end|><|eot|>") is None
    trajectory = episode.finish()
    assert trajectory.status == "time_limit"
    assert trajectory.seconds["tools"] < 5
    assert trajectory.turns[-1].results[0].content.startswith("stopped after 0.")


@pytest.mark.parametrize(
    "change", [{"calls": 0}, {"tools_s": 0.0}, {"tools_cpu_s": -1.0}, {"grade_s": 0.0}]
)
def test_limits_that_allow_nothing_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        dataclasses.replace(LIMITS, **change)


def test_a_model_that_waits_as_long_as_it_may_does_not_end_the_run():
    config = build(RunConfig, quickstart.get_config())
    assert config.rollout.worker_deadline_s > config.limits.longest_wait_s
    assert config.limits.longest_wait_s > config.limits.tools_s + 2 * config.limits.grade_s
    hasty = quickstart.get_config()
    hasty.rollout.worker_deadline_s = 60.0
    with pytest.raises(
        ConfigError, match=r"worker_deadline_s=60 must be above the 320 s that limits"
    ):
        build(RunConfig, hasty)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
NAMES = st.sampled_from(["write_file", "edit_file", "read_file", "run_tests", "submit", "fly", ""])
KEYS = st.sampled_from(["path", "content", "old", "new", "first_line", "last_line", "x"])
PATHS = st.sampled_from(["solution.py", "a/b", "..", "/", "\0", "notes.txt/x", "é" * 200])
written = st.tuples(NAMES, st.dictionaries(KEYS, json_values | PATHS, max_size=4))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(messages=st.lists(st.lists(written, max_size=4), min_size=1, max_size=4))
def test_whatever_calls_a_model_writes_an_episode_comes_to_its_end(
    task, pool, chat_tokenizer, messages
):
    episode = make(task, pool, chat_tokenizer, "hermes")
    for message in [*messages, *[[("submit", {})]] * 4]:
        calls = "".join(call(name, json.dumps(arguments)) for name, arguments in message)
        if not episode.over:
            say(episode, chat_tokenizer, calls + "<|im_end|>")
    trajectory = episode.finish()
    assert trajectory.status in ("submitted", "turn_limit", "token_limit")
    json.dumps([dict(call.arguments) for turn in trajectory.turns for call in turn.calls])
