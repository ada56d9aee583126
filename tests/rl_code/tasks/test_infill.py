"""Files with a hole, their demonstrations and their protocol."""

from __future__ import annotations

import random

import pytest

from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.environment.protocols.api import find_protocol
from rl_code.environment.protocols.infill import Infill
from rl_code.environment.tools.api import find_tools
from rl_code.environment.tools.suggest import around
from rl_code.tasks import infill
from rl_code.tasks.api import find_source
from rl_code.tasks.demonstrations import DemonstrationConfig, check_demonstrable, demonstrate
from rl_code.types import Limits

LEVELS = (1, 2, 3)
TASKS = [infill.generate("train", 0, index, LEVELS) for index in range(60)]
LIMITS = Limits(turns=1, tokens=128, turn_tokens=24, test_runs=0, command_s=5.0)
TOOLS = find_tools([Named("suggest")])


@pytest.mark.parametrize("task", TASKS[:20], ids=lambda task: task.id)
def test_the_wanted_text_makes_the_file_whole(task):
    before, behind = around(task)
    whole = before + task.meta["wanted"] + behind
    assert whole == task.reference[task.path]
    compile(whole, task.path, "exec")
    assert task.meta["wanted"].strip() and "\n" not in task.meta["wanted"]
    assert before.startswith("# ") and behind.startswith("\n")


def test_the_comment_states_the_constants_only_where_they_can_be_known():
    told = [any(map(str.isdigit, around(t)[0].splitlines()[0])) for t in TASKS]
    unknowable = [t for t, digits in zip(TASKS, told, strict=True) if not t.meta["stated"]]
    assert unknowable and len(unknowable) < len(TASKS) / 2
    assert not any(digits for t, digits in zip(TASKS, told, strict=True) if not t.meta["stated"])


def test_the_same_arguments_give_the_same_task():
    again = infill.generate("train", 0, 7, LEVELS)
    assert again == TASKS[7]
    assert infill.generate("train", 1, 7, LEVELS) != TASKS[7]


def test_splits_are_those_of_the_functions():
    kinds = {
        split: {
            frozenset(step[0] for step in infill.generate(split, 0, i, (2,)).meta["program"])
            for i in range(80)
        }
        for split in ("train", "test")
    }
    assert not kinds["train"] & kinds["test"]


def test_demonstrations_are_right_as_often_as_they_say():
    rng = random.Random(0)
    texts = [(t.meta["wanted"], infill.demonstrate(t, rng, 0.65)) for t in TASKS for _ in range(20)]
    nothing = sum(text == "" for _, text in texts) / len(texts)
    right = sum(text == wanted for wanted, text in texts) / len(texts)
    assert abs(nothing - infill.P_NOTHING) < 0.03
    # a mistake may leave the wanted line as it is
    assert 0.65 * (1 - infill.P_NOTHING) - 0.04 < right < 0.95
    assert all(infill.demonstrate(t, rng, 1.0) in ("", t.meta["wanted"]) for t in TASKS)


def test_a_demonstration_is_written_as_an_episode_is():
    protocol = Infill()
    prompt, message = demonstrate(TASKS[0], random.Random(1), DemonstrationConfig(), LIMITS)
    assert prompt.text == protocol.prompt(TASKS[0], TOOLS) and not prompt.sampled
    assert message.sampled and message.text.endswith("<|eot|>")
    text = message.text.removesuffix("<|eot|>")
    (call,) = protocol.parse(text, TASKS[0], TOOLS)
    assert (call.name, call.arguments) == ("suggest", {"text": text})


def test_what_does_not_go_together_is_refused():
    with pytest.raises(ConfigError, match=r"needs tools=\('suggest',\)"):
        find_protocol(Named("infill"), find_tools(), "config.protocol")
    compact = find_protocol(Named("compact"), find_tools(), "config.protocol")
    with pytest.raises(ValueError, match="written in the protocol 'infill'"):
        check_demonstrable(compact, find_tools(), ("infill",))
    with pytest.raises(ConfigError, match="levels"):
        find_source(Named("infill", {"split": "train", "levels": (9,)}), "config.tasks")


def test_a_silent_file_says_nothing_of_what_is_wanted():
    silent = [infill.generate("train", 0, index, LEVELS, 1.0) for index in range(60)]
    for task, other in zip(silent, TASKS, strict=True):
        before, _ = around(task)
        assert before.startswith("# helper\n") and not task.meta["stated"]
        # nothing else of the file is another one
        assert task.meta["wanted"] == other.meta["wanted"]
        first = (each.files[each.path].partition("\n")[2] for each in (task, other))
        assert len(set(first)) == 1
    some = [infill.generate("train", 0, index, LEVELS, 0.5) for index in range(60)]
    assert 15 < sum(around(task)[0].startswith("# helper\n") for task in some) < 45
