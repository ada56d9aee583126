"""What a policy reads is frozen: prompts and observations may change only on purpose.

A changed word would make trained weights and recorded runs read another language. The digests were
taken before tools, protocols and sources of tasks became members that a config names.
"""

from __future__ import annotations

import hashlib
import json
import random

import pytest

from configs import quickstart
from models.tokenizer import Tokenizer
from rl_code.config import read_config
from rl_code.environment.episode import Episode
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.tools.api import find_tools
from rl_code.run.config import RunConfig
from rl_code.tasks.api import find_source
from rl_code.tasks.demonstrations import DemonstrationConfig, demonstrate
from rl_code.tasks.generated import generate
from rl_code.types import Limits
from tests.rl_code.signals import rewarder

COUNT = 24
# Every tool of the compact protocol, right and wrong, and every way to be malformed.
MESSAGES = (
    "<|call|>read<|end|><|call|>read nothing.py<|end|><|call|>read solution.py 1 1<|end|>"
    "<|call|>read a b<|end|><|call|>read solution.py 9 1<|end|>",
    "<|call|>test<|end|><|call|>test now<|end|><|call|>fly<|end|>out<|call|>submit x<|end|>",
    "<|call|>edit\nreturn\n=====\nreturn 1 +<|end|><|call|>edit\nno\n=====\nx<|end|>"
    "<|call|>edit x<|end|><|call|>edit\nold<|end|><|call|>edit\n\n=====\n<|end|>",
    "<|call|>run\necho one; exit 3<|end|><|call|>run echo<|end|><|call|>run\nseq 300<|end|>",
    "<|call|>write\ndef f(x):\n    return x<|end|><|call|>write f<|end|><|call|>test<|end|>"
    "<|call|>write\nx",
    "no call",
    "<|call|>submit<|end|>",
)


@pytest.fixture(scope="module")
def tasks():
    config = read_config.build(RunConfig, quickstart.get_config())
    return find_source(config.tasks, "tasks").load(None, None)[:COUNT]


def digest(parts) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("compact", "5e34eb3161f8cea7"),
        ("hermes", "30a6b1a83f2414fb"),
        ("qwen3_coder", "485042128b2fb5a3"),
        ("llama3", "18b7d881534b8d57"),
        ("completion", "3bc3637c32908f51"),
    ],
)
def test_prompts_are_what_they_were(tasks, name, expected):
    assert digest(PROTOCOLS[name].prompt(task, find_tools()) for task in tasks) == expected


# The same in sentences: a message per call, as a large model writes them.
CALLS = (
    ("read_file", {"path": "solution.py"}),
    ("read_file", {"path": "none.py"}),
    ("read_file", {"path": "solution.py", "first_line": 9}),
    ("read_file", {"path": 3}),
    ("fly", {}),
    ("run_tests", {}),
    ("edit_file", {"path": "solution.py", "old": "no", "new": "x"}),
    ("edit_file", {"path": "solution.py", "old": "return", "new": "return 1 +"}),
    ("terminal", {"command": "echo one; exit 3"}),
    ("terminal", {"command": "echo two"}),
    ("write_file", {"path": "../x", "content": "x"}),
    ("write_file", {"path": "solution.py", "content": "def f(x):\n    return x\n"}),
    ("write_file", {"path": "solution.py"}),
    ("run_tests", {}),
    ("run_tests", {"now": "x"}),
    ("run_tests", {}),
    ("submit", {}),
)


def play(task, pool, tokenizer, name: str, messages) -> tuple[list, list]:
    """Tokens of the trajectory; the answers, and what the episode came to."""
    episode = Episode(
        task,
        group=0,
        index=0,
        protocol=PROTOCOLS[name],
        tools=find_tools(),
        tokenizer=tokenizer,
        pool=pool,
        limits=Limits(turns=20, tokens=40_000, turn_tokens=800, test_runs=2, command_s=20.0),
        reward=rewarder("tests", dict(name="malformed", weight=0.25, cap=(-99.0, 0.0))),
    )
    episode.start()
    answers: list = []
    for message in messages:
        ids = tokenizer.encode(message)
        answers.append(episode.step(ids, [0.0] * len(ids), [0] * len(ids)))
    trajectory = episode.finish()
    answers.append((trajectory.reward.total, trajectory.malformed_calls, trajectory.status))
    return trajectory.tokens.tolist(), answers


def test_demonstrations_are_what_they_were():
    limits = Limits(turns=5, tokens=288, turn_tokens=64, test_runs=3, command_s=5.0)
    segments = [
        (segment.text, segment.sampled)
        for index in range(100)
        for segment in demonstrate(
            generate("train", 0, index, (1, 2, 2, 3, 4, 5)),
            random.Random(f"demonstration/0/{index}"),
            DemonstrationConfig(p_right=0.65, p_test=0.5, p_give_up=0.4),
            limits,
        )
    ]
    assert digest(segments) == "e6b781880b0a4620"


def test_short_observations_and_their_tokens_are_what_they_were(tasks, pool):
    texts = [PROTOCOLS["compact"].prompt(task, find_tools()) for task in tasks]
    tokenizer = Tokenizer.train(texts, 400, Compact.SPECIAL_TOKENS, eos="<|eot|>", pad="<|pad|>")
    messages = [f"{message}<|eot|>" for message in MESSAGES]
    played = [play(task, pool, tokenizer, "compact", messages) for task in tasks]
    assert list(map(digest, zip(*played, strict=True))) == ["4741afc41d789d69", "df402f8af799f7ea"]


def test_sentences_and_their_tokens_are_what_they_were(tasks, pool):
    special = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    texts = [PROTOCOLS["hermes"].prompt(task, find_tools()) for task in tasks[:4]]
    tokenizer = Tokenizer.train(texts, 400, special, eos="<|im_end|>", pad="<|endoftext|>")
    calls = [json.dumps({"name": tool, "arguments": arguments}) for tool, arguments in CALLS]
    messages = [f"<tool_call>{call}</tool_call><|im_end|>" for call in calls]
    played = [play(task, pool, tokenizer, "hermes", messages) for task in tasks[:8]]
    assert list(map(digest, zip(*played, strict=True))) == ["47c5ea7191bf34da", "9f363b990e0211b1"]
