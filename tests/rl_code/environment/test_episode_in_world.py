"""Episodes over layers: played, forked in the middle, graded over the same layers, masked where a
layer is missing."""

from __future__ import annotations

import dataclasses

import pytest

from rl_code.environment.episode import Episode
from rl_code.environment.layers import folder
from rl_code.environment.layers.store import LayerStore
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool
from rl_code.rewards.quality import Quality
from rl_code.types import Fork, Layer, Limits, World
from tests.rl_code.environment import scripted
from tests.rl_code.environment.scripted import begin
from tests.rl_code.signals import rewarder

LIMITS = Limits(turns=4, tokens=600, turn_tokens=200, test_runs=3, command_s=30.0)
SUBMIT = "<|call|>submit<|end|>"
HELPER = "import os\n\n\ndef twice(y):\n    return 2 * y\n"


def write(text: str) -> str:
    return f"<|call|>write\n{text}<|end|>"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return LayerStore(tmp_path_factory.mktemp("layers"))


@pytest.fixture(scope="module")
def sandboxes(store):
    with SandboxPool(SandboxConfig(workers=1, layers=str(store.folder))) as pool:
        yield pool


@pytest.fixture
def layered(task, store, tmp_path):
    """The task with its files in a layer, and a helper that only the layer has."""
    for path, text in task.files.items():
        (tmp_path / path).write_text(text)
    (tmp_path / "helper.py").write_text(HELPER)
    world = World((Layer(folder.build(store, tmp_path), "/workspace"),))
    return dataclasses.replace(task, files={}, world=world)


def start(task, sandboxes, tokenizer, reward=None) -> Episode:
    return begin(task, sandboxes, tokenizer, LIMITS, reward=reward)


def say(episode: Episode, tokenizer, message: str) -> None:
    scripted.say(episode, tokenizer, f"{message}<|eot|>")


GOOD = write("import helper\ndef f(x):\n    return [helper.twice(y) for y in x]\n")


def test_an_episode_over_layers_parts_in_the_middle(layered, sandboxes, tokenizer):
    one = start(layered, sandboxes, tokenizer)
    say(one, tokenizer, write("def f(x):\n    return x + 1") + "<|call|>test<|end|>")
    two = one.fork(1)
    say(two, tokenizer, GOOD + SUBMIT)
    say(one, tokenizer, SUBMIT)
    good, bad = two.finish(), one.finish()
    assert (good.index, bad.index) == (1, 0)
    assert good.solved and good.reward.total == 1.0 and not bad.solved
    shared = good.turns[2].end  # the prompt, a message and its answer
    assert good.turns[:3] == bad.turns[:3] and good.turns[3] != bad.turns[3]
    assert good.contexts[0].tokens[:shared].tolist() == bad.contexts[0].tokens[:shared].tolist()
    with pytest.raises(ValueError, match="cannot be forked: submitted"):
        one.fork(2)


def test_a_fork_before_any_tool_was_used_and_without_layers(task, sandboxes, tokenizer):
    one = start(task, sandboxes, tokenizer)
    two = one.fork(1)
    say(two, tokenizer, write("def f(x):\n    return [2 * y for y in x]\n") + SUBMIT)
    say(one, tokenizer, SUBMIT)
    assert two.finish().solved and not one.finish().solved


def test_a_fork_knows_where_it_parts_and_holds_no_process_until_it_is_used(
    layered, sandboxes, tokenizer
):
    one = start(layered, sandboxes, tokenizer)
    assert one.forkable and one.border.turn == 0
    say(
        one,
        tokenizer,
        write("def f(x):\n    return x + 1") + "<|call|>run\necho a > new.txt<|end|>",
    )
    two = one.fork(5)
    three = two.fork(6)  # it has said nothing yet, so this one parts from the first as well
    assert two._workspace._sandbox is None and three._workspace._sandbox is None
    length = len(one.at_work[1])
    say(one, tokenizer, "<|call|>run\necho b > new.txt<|end|>")
    say(two, tokenizer, "<|call|>run\ncat new.txt<|end|>")
    four = two.fork(7)
    for episode in (two, three, four):
        say(episode, tokenizer, GOOD + SUBMIT)
    say(one, tokenizer, SUBMIT)
    main, *forks = (episode.finish() for episode in (one, two, three, four))
    assert main.fork is None and all(fork.solved for fork in forks)
    assert forks[0].fork == forks[1].fork == Fork(0, 1, (length,))
    assert (forks[2].fork.of, forks[2].fork.turn) == (5, 2)
    assert any("a" in result.content for result in forks[0].turns[4].results)
    own = forks[0].own_sampled
    assert not own[:length].any() and (own[length:] == forks[0].sampled[length:]).all()


def test_a_missing_layer_is_a_fault_and_no_reward(layered, sandboxes, tokenizer):
    missing = World((Layer("sha256:" + "0" * 64, "/workspace"),))
    episode = start(dataclasses.replace(layered, world=missing), sandboxes, tokenizer)
    say(episode, tokenizer, GOOD + SUBMIT)
    trajectory = episode.finish()
    assert trajectory.status == "fault" and trajectory.reward.flags == ("fault",)
    assert trajectory.reward.total == 0.0 and not trajectory.reward.components


def test_signals_compare_with_what_the_layers_had(task, layered, sandboxes, tokenizer):
    given = {"helper.py": HELPER, "solution.py": task.files["solution.py"]}
    finished = []

    def note(episode):
        finished.append(episode)
        return rewarder()(episode)

    for added in ("TWO = 2\n", "import re\n"):
        episode = start(layered, sandboxes, tokenizer, note)
        say(
            episode, tokenizer, f"<|call|>run\nprintf '{added}' >> helper.py<|end|>" + GOOD + SUBMIT
        )
        assert episode.finish().solved
        assert finished[-1].files_before == given
        assert finished[-1].files_after["helper.py"] == HELPER + added
    # The unused import of the layer is nobody's fault, another one is. Both add two lines where the
    # reference adds none.
    longer = Quality.length * (2 - Quality.slack)
    prices = [-longer, -longer - 2 * Quality.diagnostic]
    assert [*map(Quality(), finished)] == pytest.approx(prices)
