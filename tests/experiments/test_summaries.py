"""Tasks that no context holds: demonstrations are in the words of an episode, and solve the task."""

from __future__ import annotations

import dataclasses
import random

import pytest

from experiments.summaries.source import (
    GO_ON,
    REQUEST,
    Gather,
    generate,
    mistaken,
    part,
)
from models.tokenizer import Tokenizer
from rl_code.environment.asked import Asked
from rl_code.environment.frames import Elsewhere
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.summaries import SummariesConfig
from rl_code.tasks.demonstrations import PLAYED
from rl_code.types import Limits
from tests.rl_code.environment.conftest import FakePool
from tests.rl_code.environment.scripted import begin

SIZE = dict(files=(5, 8), constants=6)


def test_parts_of_all_contexts_make_an_episode_that_solves_the_task(monkeypatch):
    pool = FakePool()
    monkeypatch.setattr("rl_code.environment.grading.grade", pool.grade)
    tokenizer = Tokenizer.train(
        ["def f():\n    return [12, 34]\n"] * 4, 300, Compact.SPECIAL_TOKENS
    )
    task = generate("train", 0, 3, **SIZE)
    # two modules of each context, whatever their tokens; by the summary that they begin with
    parts = {}
    for seed in range(100):
        texts = part(task, random.Random(seed), 0.0, (2, 2))
        parts["" if texts[0][1] else texts[0][0]] = texts
    settings = SummariesConfig(1, tokens=200, most=8, request=REQUEST, go_on=GO_ON)
    limits = Limits(12, 20_000, 400, 0, 5.0)
    episode = begin(task, pool, tokenizer, limits, asked=Asked(summaries=settings))
    start = ""
    while not episode.over:
        behind = parts[start][2:] if start else parts[start]
        for at, (text, said) in enumerate(behind):
            if not said:
                continue
            # a summary is due exactly where the demonstration says so
            told = behind[at + 1][0] if at + 1 < len(behind) else ""
            trigger = 1 if REQUEST in told else 10**6
            episode._frames._summaries = dataclasses.replace(settings, trigger=trigger)
            tokens = tokenizer.encode(text)
            answer = episode.step(tokens, [0.0] * len(tokens), [0] * len(tokens))
            if isinstance(answer, Elsewhere):
                start = text
                assert tokenizer.decode(answer.tokens).endswith(f"{start}<|tool|>{GO_ON}<|eot|>")
            elif answer is not None:
                assert tokenizer.decode(answer) == told
    trajectory = episode.finish()
    assert trajectory.solved and len(trajectory.contexts) > 2


def test_a_wrong_summary_forgets_a_module_or_takes_another_constant():
    task = generate("train", 0, 0, **SIZE)
    modules, values = task.meta["modules"], task.meta["values"]
    known = dict(zip(modules[:3], values[:3], strict=True))
    for seed in range(20):
        wrong = mistaken(known, task, random.Random(seed))
        assert wrong != known or task.meta["others"][:3] != values[:3]
        for module, value in wrong.items():
            assert f" = {value}\n" in task.files[f"{module}.py"]


def test_the_stream_is_the_same_for_the_same_settings_and_parts_vary():
    one, other = Gather("train"), Gather("train")
    assert one.task(7) == other.task(7) != Gather("train", seed=1).task(7)
    firsts = [one.task(i).meta[PLAYED][0] for i in range(200)]
    assert {said for _, said in firsts} == {True, False}
    lasts = [one.task(i).meta[PLAYED][-1][0] for i in range(200)]
    shares = sum("submit" in text for text in lasts) / 200
    assert 0.2 < shares < 0.6
    for i in range(50):
        task = one.task(i)
        assert all(f"{module}.py" in task.files for module in task.meta["modules"])


def test_settings_that_cannot_be():
    for wrong in ({"files": (1, 3)}, {"between": (0, 2)}, {"constants": 1}, {"wrong": 1.5}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Gather("train", **wrong)
