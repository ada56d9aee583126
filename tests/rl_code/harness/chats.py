"""A tokenizer of a chat family, and agents and episodes for tests."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

from models.tokenizer import Tokenizer
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.harness.episode import AgentEpisode
from rl_code.harness.harness import Harness
from rl_code.harness.program import Program
from rl_code.types import Limits
from tests.rl_code.signals import rewarder

SPECIAL = ("<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
MINIMAL = Path(__file__).with_name("minimal_agent.py")
LIMITS = Limits(turns=8, tokens=6000, turn_tokens=200, test_runs=3, command_s=60.0, tools_s=300.0)


@functools.cache
def chat_tokenizer() -> Tokenizer:
    """Of 256 bytes, ChatML's marks and a few merges."""
    texts = ['<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'] * 3
    return Tokenizer.train(texts, 320, SPECIAL, eos="<|im_end|>", pad="<|pad|>")


def minimal(*options: str) -> Program:
    """The agent of ``minimal_agent.py``."""
    return Program(command=(sys.executable, str(MINIMAL), *options))


def agent_episode(
    task,
    pool,
    harness: Harness,
    *,
    index=0,
    limits=LIMITS,
    protocol="hermes",
    reward=("tests",),
    tokenizer=None,
):
    """An episode that nobody drives yet."""
    return AgentEpisode(
        task,
        group=0,
        index=index,
        protocol=PROTOCOLS[protocol],
        tokenizer=tokenizer or chat_tokenizer(),
        pool=pool,
        limits=limits,
        reward=rewarder(*reward),
        harness=harness,
    )


def call(command: str) -> str:
    """What a model writes to run a command in the hermes format."""
    body = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"<tool_call>\n{body}\n</tool_call><|im_end|>"


def say(episode, text: str, tokenizer=None):
    """Has a text sampled; returns what ``step`` returns."""
    tokens = (tokenizer or chat_tokenizer()).encode(text)
    return episode.step(tokens, [-0.5] * len(tokens), [3] * len(tokens))


@functools.cache
def mini_python() -> str | None:
    """A Python that has mini-swe-agent: the one of the variable MINI_SWE_AGENT_PYTHON, or this one;
    None for none.
    """
    for python in filter(None, (os.environ.get("MINI_SWE_AGENT_PYTHON"), sys.executable)):
        code = "import importlib.util as u; raise SystemExit(not u.find_spec('minisweagent'))"
        if subprocess.run([python, "-c", code], check=False, capture_output=True).returncode == 0:
            return python
    return None
