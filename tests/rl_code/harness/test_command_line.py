"""Agents whose programs run inside of the sandbox: a program of the tests, and unmodified ones of
others where AGENTS names the folder that has them (configs/any_agent.py). What is sampled is
written by the test.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from configs import any_agent
from rl_code.config.named import Named
from rl_code.environment.frames import Rewritten
from rl_code.harness.agent import HarnessError
from rl_code.harness.api import find_agent
from rl_code.harness.command_line import CommandLine
from rl_code.harness.harness import Harness
from rl_code.harness.known_agents import Codex, KnownAgent
from tests.rl_code.harness.chats import LIMITS, agent_episode, call, chat_tokenizer

PROGRAM = Path(__file__).with_name("inside_agent.py")
GOOD = "sed -i 's/return x/return [2 * y for y in x]/' lib/a.py"
DONE = "Done.<|im_end|>"
AGENTS, ACP = os.environ.get("AGENTS", ""), os.environ.get("ACP", "")
LARGE = dataclasses.replace(LIMITS, tokens=200_000, turn_tokens=2000)


def inside(*words: str, **settings) -> CommandLine:
    """The program of the tests."""
    line = ("{python}", "{programs}/inside_agent.py", "{url}", "{model}", *words)
    limits = dict(memory_mb=512, address_mb=0, processes=32)
    return CommandLine(command=line, programs=(str(PROGRAM),), **limits, **settings)


@pytest.fixture
def play(task, sandboxes, monkeypatch):
    """Starts an episode of an agent; all are ended after the test. ``tokenised`` counts tokens."""
    opened = []
    tokenizer = chat_tokenizer()
    encode = type(tokenizer).encode

    def counted(self, text):
        tokens = encode(self, text)
        start.tokenised += len(tokens)
        return tokens

    def start(agent, **changes):
        start.tokenised = 0
        harness = Harness(agent)
        opened.append(harness)
        episode = agent_episode(task, sandboxes, harness, **changes)
        opened.append(episode)
        monkeypatch.setattr(type(tokenizer), "encode", counted)
        episode.start()
        return episode

    yield start
    for each in reversed(opened):
        each.close()


def answer(play, episode, text):
    """Has a text sampled, whose tokens do not count as tokenised."""
    before = play.tokenised
    tokens = chat_tokenizer().encode(text)
    play.tokenised = before
    return episode.step(tokens, [-0.5] * len(tokens), [3] * len(tokens))


def assert_once(play, trajectory):
    """Every token was either sampled or tokenised, once."""
    given = sum(int((~context.sampled).sum()) for context in trajectory.contexts)
    assert play.tokenised == given


@pytest.mark.parametrize("kind", ["chat", "responses", "messages", "acp"])
def test_a_program_inside_of_the_sandbox_solves_the_task(play, kind):
    agent = inside("acp", speaks="acp") if kind == "acp" else inside("{task}", kind)
    episode = play(agent)
    seen = chat_tokenizer().decode(answer(play, episode, call("cat lib/a.py")))
    assert "return x\nexit 0" in seen
    thinking = f"<think>\nI change it.\n</think>\n\nNow.\n{call(GOOD)}"
    assert isinstance(answer(play, episode, thinking), list)  # the same context goes on
    assert answer(play, episode, DONE) is None
    trajectory = episode.finish()
    assert (trajectory.status, trajectory.solved) == ("submitted", True)
    assert len(trajectory.contexts) == 1
    assert_once(play, trajectory)


def test_a_history_that_is_compacted_makes_a_tree(play):
    episode = play(inside("{task}", "responses", "compacting"))
    second = answer(play, episode, call("echo 1"))
    assert isinstance(second, Rewritten) and second.context == 1
    assert isinstance(answer(play, episode, call(GOOD)), Rewritten)
    assert answer(play, episode, DONE) is None
    trajectory = episode.finish()
    assert trajectory.solved and [context.parent for context in trajectory.contexts] == [-1, -1, -1]


@pytest.mark.parametrize(
    ("option", "cause"), [("dies", "exit code 1: it dies"), ("killed", "exit code 137")]
)
def test_a_program_that_dies_has_handed_nothing_in(play, option, cause):
    """Inside of the sandbox the policy can kill it: so it is no fault of the machine's."""
    episode = play(inside("{task}", "chat", option))
    assert answer(play, episode, call(GOOD)) is None
    trajectory = episode.finish()
    assert (trajectory.status, trajectory.solved) == ("agent_ended", False)
    assert episode._cause.startswith(cause)


def test_a_program_that_never_ends_is_ended_by_the_limits(play):
    episode = play(inside("{task}", "chat", "stays"))
    episode.limits = dataclasses.replace(LIMITS, tools_s=episode._calls.seconds + 0.5)
    assert answer(play, episode, call(GOOD)) is None
    trajectory = episode.finish()
    assert (trajectory.status, trajectory.solved) == ("time_limit", False)


def test_noise_and_halves_of_requests_do_not_count(play):
    episode = play(inside("{task}", "responses", "noise"))
    answer(play, episode, call(GOOD))
    assert answer(play, episode, DONE) is None
    assert episode.finish().solved


def test_a_program_inside_reaches_the_endpoint_and_nothing_else(play, sandboxes):
    """sandboxes: those of other episodes have no sockets at all."""
    episode = play(inside("{task}", "chat"), limits=LARGE)
    lines = ["import socket"]
    for port in (episode._harness.endpoint.port, 22):
        place = ("127.0.0.1", port)
        lines += ["try:", f"  socket.create_connection({place}).close()", "  print('open')"]
        lines += ["except OSError: print('shut')"]
    code = "\n".join([*lines, "print(len(open('/proc/net/dev').readlines()) - 2)"])
    seen = chat_tokenizer().decode(answer(play, episode, call(f'python3 -c "{code}"')))
    assert "open\nshut\n1\nexit 0" in seen
    other = sandboxes.open({})
    try:
        done = other.run(["python3", "-c", code], timeout_s=20.0)
    finally:
        other.close()
    assert done.stdout.startswith("shut\nshut")


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (CommandLine(), r"harness\.command = \(\)"),
        (CommandLine(command=("a", "{taks}")), r"\{taks\} in '\{taks\}' must be one of \{task\}"),
        (CommandLine(command=("a",), speaks="lsp"), "'lsp' must be '' or 'acp'"),
        (CommandLine(command=("a",), programs=("/none",)), "there is no '/none'"),
        (Codex(folder="/none"), r"harness\.folder = '/none': there is no '/none/node_modules"),
    ],
)
def test_wrong_settings_are_named(agent, message):
    with pytest.raises(HarnessError, match=message):
        _ = Harness(agent).host


def test_a_program_that_is_not_there_is_named(play):
    with pytest.raises(HarnessError, match="exit code 127: no_such_program: No such file"):
        play(CommandLine(command=("no_such_program",)))


# The tool with which each agent runs a command, and its other arguments.
SHELLS = {
    "codex": ("exec_command", "cmd", {}),
    "opencode": ("bash", "command", {"description": "look"}),
    "opencode_acp": ("bash", "command", {"description": "look"}),
    "claude_code": ("Bash", "command", {"description": "look"}),
}


needs_agents = pytest.mark.skipif(
    not AGENTS,
    reason="no agents of others: npm install --prefix agents ..., see configs/any_agent.py; "
    "AGENTS=agents",
)


def of_others(name: str, short: bool, *changes: tuple[str, str]) -> CommandLine:
    """An agent of the config. changes: words of its files and variables, and what stands there
    instead.
    """
    settings = any_agent.AGENTS[name] | {"folder": AGENTS, "short": short}
    agent = find_agent(Named(settings.pop("name"), settings), "config.harness")
    assert isinstance(agent, KnownAgent)
    if not os.path.exists(agent.line.programs[0]):
        pytest.skip(f"{agent.line.programs[0]} is not installed")

    def changed(pairs):
        for before, after in changes:
            pairs = [(key, text.replace(before, after)) for key, text in pairs]
        return tuple(pairs)

    line = agent.line
    texts = {key: changed(getattr(line, key)) for key in ("environment", "files")}
    return dataclasses.replace(line, **texts)


def shell(name: str, command: str) -> str:
    """What a model writes to run a command with an agent's own tool."""
    tool, key, more = SHELLS[name]
    body = json.dumps({"name": tool, "arguments": {key: command, **more}})
    return f"<tool_call>\n{body}\n</tool_call><|im_end|>"


@pytest.mark.long
@needs_agents
@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("name", any_agent.AGENTS)
def test_agents_of_others_solve_the_task_and_nothing_is_tokenised_twice(play, name, short):
    episode = play(of_others(name, short), limits=LARGE)
    if name == "aider":
        words = ["lib/a.py\n```\ndef f(x):\n    return [2 * y for y in x]\n```\n<|im_end|>"]
    else:
        words = [shell(name, "ls lib"), shell(name, GOOD), DONE]
        words[0] = f"<think>\nI look.\n</think>\n\nFirst.\n{words[0]}"
    for text in words:
        follows = answer(play, episode, text)
        assert isinstance(follows, list) or text is words[-1]
    assert follows is None
    trajectory = episode.finish()
    assert (trajectory.status, trajectory.solved) == ("submitted", True), episode._cause
    assert_once(play, trajectory)


@pytest.mark.long
@needs_agents
@pytest.mark.parametrize(
    ("name", "lines"), [("codex", 300), ("opencode", 300), ("claude_code", 3000)]
)
def test_histories_that_agents_of_others_compact_become_trees(play, name, lines):
    """Their limits are such that they ask for a summary after so many lines of output."""
    limit = "model_auto_compact_token_limit = 4990\nmodel_context_window = 8000\n"
    codex = ("model_instructions_file", f"{limit}model_instructions_file")
    opencode = ('{"context": 131072, "output": 4096}', '{"context": 6400, "output": 500}')
    agent = of_others(name, True, codex, opencode)
    claude = {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "100000", "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": "5"}
    agent = dataclasses.replace(agent, environment=(*agent.environment, *claude.items()))
    episode = play(agent, limits=LARGE)
    follows = answer(play, episode, shell(name, f"{GOOD}; seq {lines}"))
    if not isinstance(follows, Rewritten):
        follows = answer(play, episode, shell(name, f"seq {lines}"))
    contexts = set()
    while follows is not None:
        if isinstance(follows, Rewritten):
            contexts.add(follows.context)
        follows = answer(play, episode, DONE)
    trajectory = episode.finish()
    assert trajectory.solved and contexts == set(range(1, len(trajectory.contexts)))
    assert len(contexts) > 1 and any(context.kept > 0 for context in trajectory.contexts)
    assert_once(play, trajectory)


@pytest.mark.skipif(
    not ACP,
    reason="no agent-client-protocol: pip install --target acp agent-client-protocol==0.12.1; "
    "ACP=acp",
)
def test_an_agent_on_the_published_package_of_the_protocol_solves_the_task(play):
    program = PROGRAM.with_name("acp_agent.py")
    agent = CommandLine(
        command=("{python}", f"{{programs}}/{program.name}", "{url}", "{model}", "{path}"),
        environment=(("PYTHONPATH", f"{{programs}}/{Path(ACP).name}"),),
        programs=(str(program), ACP),
        speaks="acp",
    )
    episode = play(agent)
    seen = chat_tokenizer().decode(episode.session.whole(0))
    assert "must double each number\ndef f(x):\n    return x" in seen
    assert answer(play, episode, "def f(x):\n    return [2 * y for y in x]\n<|im_end|>") is None
    trajectory = episode.finish()
    assert (trajectory.status, trajectory.solved) == ("submitted", True), episode._cause
