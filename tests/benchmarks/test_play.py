"""The bench of played episodes: its scripted agent solves its tasks, also where sandboxes die."""

from __future__ import annotations

from benchmarks.play import messages, played, single_files, timed
from benchmarks.sandbox_kills import losing
from models.tokenizer import Tokenizer
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool
from tests.rl_code.signals import rewarder


def test_scripted_episodes_end_solved_with_and_without_losses():
    tasks = single_files(6)
    assert all(len(messages(task)) == 5 for task in tasks)
    texts = [text for task in tasks for text in task.reference.values()]
    tokenizer = Tokenizer.train(texts, 300, Compact.SPECIAL_TOKENS)
    with SandboxPool(SandboxConfig()) as pool:

        def play(task):
            return played(task, tokenizer, pool, rewarder())

        whole = timed(2, tasks, play)
        with losing(0.25, 6, seed=3) as kills:
            found = timed(2, tasks, play)
    assert whole["solved"] == found["solved"] == 6
    assert 0 < kills.killed < kills.opened
    assert whole["rebuilt"] == found["faults"] == 0
