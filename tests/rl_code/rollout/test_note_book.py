"""Notes pass from one episode to later ones of the same repository and split, and the record alone
says which ones an episode reads.
"""

from __future__ import annotations

import dataclasses
import random

import pytest

from configs import quickstart
from rl_code.config import read_config
from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.environment.notes import notes_of, scope_of, with_notes
from rl_code.environment.tools.api import check, execute, find_tools
from rl_code.environment.tools.workspace import Workspace
from rl_code.rollout.note_book import NoteBook
from rl_code.run.config import RunConfig
from rl_code.store.claims import Claims, WorkConfig
from rl_code.store.store import GroupStore
from rl_code.types import Group, Limits, Task, Tests, ToolCall, ToolResult, Turn
from tests.rl_code.environment.conftest import FakePool
from tests.rl_code.store.groups import make_items, make_trajectory

NAMES = ("memory_store", "memory_recall", "memory_forget", "submit")
TOOLS = find_tools(tuple(Named(name) for name in NAMES))
LIMITS = Limits(turns=4, tokens=400, turn_tokens=120, test_runs=2, command_s=5.0)
STEPS, GROUPS = 7, 3


def a_task(repository="shop", split="train", **meta) -> Task:
    meta = {"split": split, "repository": repository, **meta}
    return Task("t/0", (), {}, "a.py", "f", Tests(), Tests(), {}, meta=meta)


def use(workspace, tool, **arguments):
    call = ToolCall(tool, arguments)
    assert check(call, TOOLS) == ""
    return execute(call, TOOLS, workspace)


@pytest.fixture
def workspace():
    return Workspace(a_task(), FakePool(), LIMITS, verbose=False)


def test_a_note_that_is_named_stands_before_newer_ones_that_mention_it(workspace):
    use(workspace, "memory_store", name="press", text="halves")
    use(workspace, "memory_store", name="fold", text="doubles, then press")
    shown = use(workspace, "memory_recall", question="press").content
    assert shown == "press: halves\nfold: doubles, then press"


def test_notes_are_stored_recalled_and_forgotten(workspace):
    assert use(workspace, "memory_recall").content == "no notes"
    assert use(workspace, "memory_store", name="tax", text="rate is in tax.py").ok
    assert use(workspace, "memory_store", name="cart", text="total calls rate").ok
    assert use(workspace, "memory_recall").content == "cart, tax"
    assert use(workspace, "memory_recall", question="tax").content == "tax: rate is in tax.py"
    assert use(workspace, "memory_recall", question="rate").content.startswith("cart: ")
    assert use(workspace, "memory_recall", question="nothing").content == "no such note"
    use(workspace, "memory_store", name="tax", text="gone")
    assert use(workspace, "memory_recall", question="tax").content == "tax: gone"
    assert use(workspace, "memory_forget", name="tax").ok
    assert not use(workspace, "memory_forget", name="tax").ok
    assert workspace.notes == {"cart": "total calls rate"}


def test_notes_are_few_and_short(workspace):
    assert not use(workspace, "memory_store", name="a b", text="x").ok
    assert not use(workspace, "memory_store", name="", text="x").ok
    assert not use(workspace, "memory_store", name="n" * 61, text="x").ok
    assert not use(workspace, "memory_store", name="n", text="x" * 401).ok
    assert workspace.notes == {}
    for i in range(40):
        use(workspace, "memory_store", name=f"n{i}", text="word " * 79)
    assert list(workspace.notes) == [f"n{i}" for i in range(8, 40)]
    for question in ({}, {"question": "word"}):
        assert len(use(workspace, "memory_recall", **question).content) < 450


# --- From one episode to the next -----------------------------------------------------------------


def calls_of(step: int, number: int, index: int) -> list[tuple[ToolCall, ToolResult]]:
    """What an episode of a made-up record called, and what came back."""
    rng = random.Random(f"{step}/{number}/{index}")
    name = f"n{rng.randrange(4)}"
    store = ToolCall("memory_store", {"name": name, "text": f"{step}.{number}.{index}"})
    wrong = ToolCall("memory_store", {}, "missing argument name")
    return [
        (store, ToolResult("memory_store", "stored", ok=index != 1)),
        (wrong, ToolResult("memory_store", "missing argument name", ok=False)),
        (
            ToolCall("memory_forget", {"name": f"n{rng.randrange(4)}"}),
            ToolResult("memory_forget", "forgotten"),
        ),
    ][: rng.randrange(1, 4)]


def record(folder, repositories) -> GroupStore:
    """A store with STEPS consumed steps; group n of each is of ``repositories[n]``."""
    store = GroupStore(folder, "learner")
    actor = GroupStore(folder, "actor")
    claims = Claims(actor, WorkConfig(heartbeat_timeout_s=60.0))
    for step in range(STEPS):
        items = make_items(step, GROUPS, version=step)
        store.plan(items)
        while held := claims.claim(GROUPS):
            for item in held:
                task = a_task(repositories[item.number], split=f"s{item.number % 2}")
                members = []
                for index in range(2):
                    trajectory = make_trajectory(task, item.group, index, [1, 2, 3, 4], step)
                    calls, results = zip(*calls_of(step, item.number, index), strict=True)
                    said = dataclasses.replace(trajectory.turns[1], calls=calls, results=())
                    turns = (trajectory.turns[0], said, Turn("tool", 4, 4, "", results=results))
                    members.append(dataclasses.replace(trajectory, turns=turns))
                actor.deliver(item, Group(task, tuple(members)))
        records = store.wait(step, 10.0)
        store.consume(step, records, version=step, weights="0")
    claims.close()
    return store


def told(repositories, upto: int, scope) -> dict[str, str]:
    """The notes of a scope after the steps before ``upto``, by a dict alone."""
    notes: dict[str, str] = {}
    for step in range(upto):
        for number in range(GROUPS):
            if (f"s{number % 2}", repositories[number]) != scope:
                continue
            for index in range(2):
                for call, result in calls_of(step, number, index):
                    if result.ok and not call.error:
                        notes.pop(call.arguments["name"], None)
                        if call.name == "memory_store":
                            notes[call.arguments["name"]] = call.arguments["text"]
    return notes


def test_an_episode_reads_what_the_steps_before_left_to_its_scope(tmp_path):
    repositories = ("shop", "shop", "shop")  # groups 0 and 2 share a split
    store = record(tmp_path, repositories)
    for bound in (0, 1):
        book = NoteBook(store, TOOLS, bound)
        for step in range(STEPS + 2 + bound):
            upto = max(step - bound - 1, 0)
            for split in ("s0", "s1", "test"):
                task = book.task(a_task(split=split), step)
                wanted = told(repositories, upto, (split, "shop"))
                assert list(notes_of(task).items()) == list(wanted.items())
            assert notes_of(book.task(a_task("other", split="s0"), step)) == {}
        # one that begins late, as after a restart or in another actor, says the same
        late = NoteBook(GroupStore(tmp_path), TOOLS, bound)
        last = STEPS + 1 + bound
        assert late.task(a_task(split="s0"), last) == book.task(a_task(split="s0"), last)
        assert notes_of(late.task(a_task(split="s0"), last))
    # tools without notes read no record
    assert NoteBook(None, {"submit": TOOLS["submit"]}, 0).task(a_task(), 9) == a_task()


def test_what_an_episode_reads_is_in_its_task_and_what_it_stores_is_its_own():
    task = with_notes(a_task(), {"tax": "old"})
    assert scope_of(task) == ("train", "shop") and with_notes(a_task(), {}) == a_task()
    first, second = (Workspace(task, FakePool(), LIMITS, verbose=False) for _ in range(2))
    use(first, "memory_store", name="tax", text="new")
    assert use(second, "memory_recall", question="tax").content == "tax: old"
    assert notes_of(task) == {"tax": "old"}
    fork = first.fork()
    use(fork, "memory_forget", name="tax")
    assert first.notes == {"tax": "new"} and fork.notes == {}


def test_a_record_that_is_not_kept_is_refused():
    config = quickstart.get_config("smoke")
    names = ("write_file", "run_tests", "submit", "memory_store")
    with config.unlocked(), config.ignore_type():
        config.tools = names
        config.record = dict(keep=10)
    with pytest.raises(ConfigError, match=r"config\.record\.keep = 10: the notes of memory_store"):
        read_config.build(RunConfig, config)
