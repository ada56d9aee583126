"""The unmodified package mini-swe-agent plays generated repositories through the endpoint.

It needs a Python that has the package: MINI_SWE_AGENT_PYTHON=path/to/python, or this one.
"""

from __future__ import annotations

import dataclasses
import sys

import jax
import pytest

from models.sharding import MeshConfig, make_mesh
from rl_code.environment.frames import Rewritten
from rl_code.harness.agent import HarnessError
from rl_code.harness.harness import Harness
from rl_code.harness.mini_swe_agent import MiniSweAgent, MiniSweAgentHost
from rl_code.rollout.engine import Engine
from rl_code.rollout.sampling import SamplingConfig
from rl_code.rollout.scheduler import Scheduler
from rl_code.tasks.repositories import generate
from tests.rl_code.harness.chats import (
    LIMITS,
    agent_episode,
    call,
    chat_tokenizer,
    mini_python,
    say,
)
from tests.rl_code.harness.test_rollout import (
    ENGINE,
    MODEL,
    assert_as_given,
    assert_trained_alike,
)
from tests.rl_code.rollout.small import model_on

needs_package = pytest.mark.skipif(
    mini_python() is None,
    reason="no Python with mini-swe-agent: python -m venv mini; mini/bin/pip install "
    "mini-swe-agent==2.4.6; MINI_SWE_AGENT_PYTHON=mini/bin/python",
)
OPENING = chat_tokenizer().encode("<|im_start|>assistant\n")
SHORT = MiniSweAgent(
    python=mini_python() or "",
    calls="text",
    system="Answer with a command.",
    instance="{{task}}",
    observation="{{output.output}}exit {{output.returncode}}",
    format_error="one command, please",
    format_errors=0,
)


@pytest.fixture(scope="module")
def harnesses():
    """By the way in which the agent calls; the package is imported once for each."""
    made = {}
    yield lambda agent: made.setdefault(agent.calls, Harness(agent))
    for harness in made.values():
        harness.close()


def repository():
    return generate("train", 0, 3, levels=(1,), files=(5, 6))


def mend(task) -> str:
    """The command that writes the reference."""
    ((path, text),) = task.reference.items()
    return f"cat > {path} <<'EOF'\n{text}EOF"


@needs_package
def test_the_package_solves_a_repository_with_its_own_prompt(harnesses, sandboxes):
    task = repository()
    harness = harnesses(MiniSweAgent(python=mini_python()))
    limits = dataclasses.replace(LIMITS, tokens=20_000)
    episode = agent_episode(task, sandboxes, harness, limits=limits)
    try:
        prompt = chat_tokenizer().decode(episode.start())
        assert task.messages[0]["content"] in prompt and "COMPLETE_TASK" in prompt
        assert '"name": "bash"' in prompt  # its tool is declared
        seen = chat_tokenizer().decode(say(episode, call(f"ls && cat {task.path}")))
        assert task.meta["cause"] in seen and task.entry_point in seen
        # two calls in one message
        both = call(mend(task)).removesuffix("<|im_end|>") + "\n" + call("git status; true")
        assert chat_tokenizer().decode(say(episode, both)).count("<tool_response>") == 2
        # The package answers what has no call, and leaves that message out of its history.
        rewritten = say(episode, "I am done.<|im_end|>")
        assert isinstance(rewritten, Rewritten)
        text = chat_tokenizer().decode(rewritten.tokens)
        assert "No tool calls found" in text and "I am done" not in text
        assert say(episode, call("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")) is None
        trajectory = episode.finish()
    finally:
        episode.close()
    assert trajectory.status == "submitted" and trajectory.solved
    # Otherwise its history goes on word by word: no further context, and all of the first is kept.
    _, second = trajectory.contexts
    assert (second.parent, second.kept) == (0, trajectory.turns[4].end - len(OPENING))
    assert [turn.role for turn in trajectory.turns].count("assistant") == 4


@needs_package
def test_the_package_gives_up_where_nothing_can_be_read(harnesses, sandboxes):
    harness = harnesses(MiniSweAgent(python=mini_python()))
    limits = dataclasses.replace(LIMITS, tokens=20_000)
    episode = agent_episode(repository(), sandboxes, harness, limits=limits)
    try:
        episode.start()
        while say(episode, "no<|im_end|>") is not None:
            pass
        trajectory = episode.finish()
    finally:
        episode.close()
    assert (trajectory.status, trajectory.solved) == ("agent_ended", False)
    assert "RepeatedFormatError" in episode._cause


@needs_package
def test_a_process_that_is_killed_is_a_fault_and_then_an_error(sandboxes):
    harness = Harness(SHORT)
    limits = dataclasses.replace(LIMITS, turns=1000)
    episode = agent_episode(repository(), sandboxes, harness, limits=limits)
    other = agent_episode(repository(), sandboxes, harness, index=1)
    try:
        episode.start()
        harness.host._process.kill()
        harness.host._process.wait()
        while not episode.over:  # its child may ask once more before it is ended
            say(episode, "no<|im_end|>")
        trajectory = episode.finish()
        with pytest.raises(HarnessError, match="mini-swe-agent has ended"):
            other.start()
    finally:
        episode.close()
        other.close()
        harness.close()
    assert (trajectory.status, trajectory.reward.flags) == ("fault", ("fault",))


def test_a_child_that_is_killed_is_a_fault_and_one_that_gives_up_is_none():
    def ending(status):
        return MiniSweAgentHost.ending(None, {"status": status, "error": ""})

    assert ending("killed").fault and not ending("killed").handed_in
    assert not ending("RepeatedFormatError").fault and ending("Submitted").handed_in


@needs_package
def test_the_record_of_the_package_is_what_the_engine_was_given(harnesses, sandboxes):
    tokenizer = chat_tokenizer()
    stops = tuple(sorted(tokenizer.token_id(token) for token in ("<|im_end|>", "<|endoftext|>")))
    mesh = make_mesh(MeshConfig(data=1, tensor=1))
    engine = Engine(MODEL, ENGINE, SamplingConfig(), stops, mesh)
    scheduler = Scheduler(engine, tokenizer, workers=4, worker_deadline_s=2000.0)
    seen = {index: set() for index in range(3)}

    def look(rows):
        for row in rows:
            seen[row.episode.index].add(tuple(row.tokens))

    scheduler.before_dispatch = look
    limits = dataclasses.replace(LIMITS, turns=3, tokens=504, turn_tokens=12)
    harness = harnesses(SHORT)
    try:
        ((group,), _) = scheduler.rollout(
            model_on(mesh, MODEL),
            [repository()],
            lambda task, number, index: agent_episode(
                task, sandboxes, harness, index=index, limits=limits
            ),
            group_size=3,
            version=1,
            key=jax.random.key(1),
        )
    finally:
        scheduler.close()
    assert_as_given(group, seen)
    assert_trained_alike(group, model_on(mesh, MODEL))
    assert {t.status for t in group.trajectories} == {"turn_limit"}
    # nothing that this model says is a command, and the package forgets what is none
    assert all(len(t.contexts) == 3 for t in group.trajectories)
    assert len({t.prompt_length for t in group.trajectories}) == 1


def test_a_python_without_the_package_is_named():
    harness = Harness(MiniSweAgent(python="no_such_python"))
    with pytest.raises(HarnessError, match=r"harness.python = 'no_such_python' cannot be started"):
        _ = harness.host
    if mini_python() != sys.executable:
        with pytest.raises(HarnessError, match="cannot import mini-swe-agent"):
            _ = Harness(MiniSweAgent(python=sys.executable)).host
    with pytest.raises(HarnessError, match="must be 'tools' or 'text'"):
        _ = Harness(MiniSweAgent(calls="words")).host
