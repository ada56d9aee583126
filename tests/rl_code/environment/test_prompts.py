"""A prompt is encoded once, and never taken for that of another task."""

from __future__ import annotations

from rl_code.config.named import Named
from rl_code.environment.prompts import Prompts
from rl_code.types import Task

CHAT, COMPACT = Named("chat"), Named("compact", {"short": True})


def task_of(id: str, text: str) -> Task:
    return Task(id, ({"role": "user", "content": text},))


def test_a_prompt_is_encoded_once_while_it_is_among_the_last():
    asked = []

    def encode(task, protocol):
        asked.append((task.messages[0]["content"], protocol.name))
        return [len(asked)], None

    prompts = Prompts(encode, most=2)
    one, two, three = (task_of(text, text) for text in ("one", "two", "three"))
    assert [prompts(task, CHAT) for task in (one, task_of("one", "one"), two, one)] == [
        ([1], None),
        ([1], None),
        ([2], None),
        ([1], None),
    ]
    prompts(three, CHAT)  # in place of the one that was asked for before the others
    assert prompts(one, CHAT) == ([1], None) and prompts(two, CHAT) == ([4], None)
    # another protocol, and another task of the same name
    prompts(two, COMPACT)
    assert prompts(task_of("two", "2"), CHAT) == ([6], None)
    assert asked == [
        *(("one", "chat"), ("two", "chat"), ("three", "chat")),
        *(("two", "chat"), ("two", "compact"), ("2", "chat")),
    ]
