"""Lookup tasks: reproducible, decided by their tests, and solved only by who reads the modules."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import long_context
from models.tokenizer import Tokenizer
from rl_code.config import read_config
from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.environment.parts import content_parts
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.tools.api import find_tools
from rl_code.run.config import RunConfig
from rl_code.tasks import lookup
from rl_code.tasks.api import find_source
from rl_code.tasks.demonstrations import DemonstrationConfig, demonstrate
from rl_code.tasks.lookup import (
    VALUES,
    Size,
    drill,
    file_text,
    generate,
    most_files,
    one_wrong,
)
from rl_code.tasks.programs import SPLITS, evaluate, split_of
from rl_code.types import Limits, Task

LIMITS = Limits(turns=1, tokens=6000, turn_tokens=96, test_runs=3, command_s=5.0)
SHORT = Size(tokens=300, files=6, matter=2, spacing=30)
LONG = Size(tokens=4000, files=10, matter=2, spacing=50)


def documents(task: Task) -> list[str]:
    parts = content_parts(task.messages[0]["content"])
    return [text for text, is_document in parts if is_document]


def prompt(task: Task) -> str:
    return "".join(text for text, _ in content_parts(task.messages[0]["content"]))


def passes(task: Task, text: str) -> bool:
    """Whether a file's text passes the hidden tests. The texts are this repository's own."""
    names: dict = {}
    try:
        exec(text, names)
        return all(names["f"](*case.args) == case.expected for case in task.hidden_tests.cases)
    except (NameError, TypeError):  # a constant is missing, or still ``...``
        return False


def read(task: Task) -> dict[str, int]:
    """The constants that the modules define, by running their texts."""
    found: dict[str, int] = {}
    for text in documents(task):
        names: dict = {}
        exec(text, names)
        own = {name: value for name, value in names.items() if isinstance(value, int)}
        assert not own.keys() & found.keys(), "a constant is defined once"
        found |= own
    return found


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(SPLITS), st.integers(0, 10**6), st.integers(1, 9), st.integers(50, 900))
def test_what_the_modules_say_solves_a_task_and_nothing_else_does(split, index, matter, tokens):
    spacing = min(30, tokens // matter)
    task = generate(split, 0, index, Size(tokens, 6, matter, spacing))
    (asked,) = task.files.values()
    assert asked in prompt(task) and not passes(task, asked)
    assert passes(task, task.reference[task.path])
    # a reader finds every constant in the modules, spread over them as evenly as can be
    known = read(task)
    filled = asked
    places = []
    for name in task.meta["names"]:
        filled = filled.replace(f"{name} = ...\n", f"{name} = {known[name]}\n")
        places += [i for i, text in enumerate(documents(task)) if f"\n{name} = " in text]
    assert filled == task.reference[task.path] and len(places) == matter
    assert len(set(places)) == matter or matter > len(documents(task))
    assert max(map(places.count, places)) <= -(-matter // len(documents(task))) + 1
    # any other value of one constant fails
    program = task.meta["program"]
    assert split_of(tuple(name for name, _ in program)) == split
    for rival in random.Random(index).sample([*one_wrong(program)], 10):
        assert not passes(task, file_text(rival, task.meta["names"]))


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(60, 700))
def test_a_drill_gives_names_and_teaches_their_values_alone(index, matter, tokens):
    task = drill("train", 0, index, Size(tokens, most_files(tokens, 6), matter, 5))
    segments = demonstrate(task, random.Random(0), DemonstrationConfig(), LIMITS)
    known = read(task)
    taught = [s.text for s in segments if s.sampled]
    asked = [
        s.text.split("\n")[-1].removesuffix(" =")
        for s, after in itertools.pairwise(segments)
        if after.sampled
    ]
    assert [f" {known[name]}" for name in asked] == taught and len(set(asked)) == matter
    # the message begins as one that writes the file does
    answer = "".join(s.text for s in segments if not s.document).split("<|eot|>")[1]
    assert answer.startswith("<|call|>write\n") and len(task.hidden_tests) == 0


def test_drills_stand_in_a_warm_start_only():
    stage = dict(tasks=2, tokens=60, matter=4, spacing=5, drill=True)
    settings = dict(split="train", tokens=100, files=2, matter=1, spacing=5, first=(stage,))
    source = find_source(Named("lookup", settings), "config.sft.tasks")
    assert source.has_drills()
    tasks = source.load(None, None)
    assert ["drill" in tasks[i].meta for i in range(3)] == [True, True, False]
    config = long_context.get_config("smoke")
    read_config.build(RunConfig, config)
    config.tasks.first = (stage,)
    with pytest.raises(ConfigError, match=r"config.tasks: stages with drill=True have no tests"):
        read_config.build(RunConfig, config)


def test_who_reads_no_module_solves_next_to_nothing():
    # the best guess of all: the pair of values that solves most tasks
    rng = random.Random(0)
    tasks = [generate("train", 1, i, SHORT) for i in range(100)]
    guesses = [(k, rng.choice(VALUES)) for k in VALUES for _ in range(3)]
    solved = [
        sum(solves(task, [k for _, k in task.meta["program"]], guess) for task in tasks)
        for guess in guesses
    ]
    assert max(solved) <= 2 and sum(solved) / len(guesses) < 0.05
    # a function that reads no constant at all, such as one that returns its input
    assert not any(passes(task, "def f(xs):\n    return xs\n") for task in tasks)


def solves(task: Task, right: list[int], guess: tuple[int, ...]) -> bool:
    """Whether the values of a guess solve a task."""
    # one wrong value fails, as shown above, so only what is wrong twice has to be tried
    if sum(k != value for k, value in zip(right, guess, strict=True)) == 1:
        return False
    names = [name for name, _ in task.meta["program"]]
    program = tuple(zip(names, guess, strict=True))
    return all(evaluate(program, c.args[0]) == c.expected for c in task.hidden_tests.cases)


def test_a_solution_has_nothing_to_import():
    task = generate("test", 0, 0, SHORT)
    assert set(task.files) == {task.path} and len(task.visible_tests) == 0


def test_splits_share_no_composition_and_training_has_every_operation():
    found = {
        split: {tuple(sorted(task.meta["template"].split("+"))) for task in some(split)}
        for split in SPLITS
    }
    assert not found["train"] & (found["validation"] | found["test"])
    assert not found["validation"] & found["test"]
    assert {name for names in found["train"] for name in names} == set(lookup.STEPS)
    assert min(len(names) for names in found.values()) >= 5


def some(split: str, count: int = 150) -> list[Task]:
    return [generate(split, 0, i, Size(60, 2, 2, 30)) for i in range(count)]


def test_tasks_have_the_length_that_was_asked_for_in_tokens_of_their_own_tokenizer():
    compact, tools = Compact(), find_tools()
    tasks = [generate("train", 0, i, LONG) for i in range(20)]
    texts = [compact.message(text_calls(task), tools) + prompt(task) for task in tasks]
    tokenizer = Tokenizer.train(texts, 704, Compact.SPECIAL_TOKENS)
    lengths = [len(tokenizer.encode("".join(documents(task)))) for task in tasks]
    assert 0.9 * LONG.tokens < min(lengths) and max(lengths) < 1.1 * LONG.tokens


def text_calls(task: Task):
    config = DemonstrationConfig(p_right=1.0)
    segments = demonstrate(task, random.Random(0), config, LIMITS)
    return Compact().parse(segments[-1].text.removesuffix("<|eot|>"), task, find_tools())


@pytest.mark.parametrize("p_right", [0.0, 1.0])
def test_a_demonstration_is_one_message_that_is_right_or_mistakes_one_constant(p_right):
    task = generate("train", 0, 3, SHORT)
    config = DemonstrationConfig(p_right=p_right, p_test=1.0)
    segments = demonstrate(task, random.Random(0), config, LIMITS)
    assert [segment.sampled for segment in segments] == [False, True]
    edit, submit = Compact().parse(segments[-1].text.removesuffix("<|eot|>"), task, find_tools())
    assert submit.name == "submit"
    edit = edit.arguments
    assert edit["path"] == task.path and task.files[task.path].count(edit["old"]) == 1
    edited = task.files[task.path].replace(edit["old"], edit["new"])
    assert passes(task, edited) == (p_right == 1.0)
    # the mistake is a constant of another name
    values = {line.split(" = ")[1] for line in edit["new"].splitlines()}
    assert values <= {str(value) for value in read(task).values()}


def test_a_mistake_can_be_made_where_the_modules_define_one_value():
    task = generate("train", 0, 0, Size(tokens=10, files=1, matter=1, spacing=50))
    wrong = lookup.wrong_lookup(task, random.Random(0))
    assert len(set(task.meta["known"].values())) == 1 and wrong != task.meta["program"]


def stage(tasks: int, tokens: int, matter: int, spacing: int = 15) -> dict:
    return dict(tasks=tasks, tokens=tokens, matter=matter, spacing=spacing)


def test_the_first_tasks_of_a_curriculum_are_short():
    settings = dict(split="train", tokens=400, files=8, first=(stage(3, 60, 4), stage(2, 120, 3)))
    tasks = find_source(Named("lookup", settings), "tasks").load(None, None)
    lengths = [lookup.token_count("".join(documents(tasks[i]))) for i in range(6)]
    for length, wanted in zip(lengths, (60, 60, 60, 120, 120, 400), strict=True):
        assert wanted <= length < wanted + 120
    assert [len(tasks[i].meta["names"]) for i in range(6)] == [4, 4, 4, 3, 3, 2]
    plain = find_source(Named("lookup", settings | dict(first=())), "tasks").load(None, None)
    assert plain[5] == tasks[5] and plain[0] != tasks[0]


@pytest.mark.parametrize(
    "named, wrong",
    [
        ("split", dict(split="dev")),
        ("matter", dict(matter=0)),
        ("matter", dict(matter=11)),
        ("files", dict(files=99)),
        ("spacing", dict(spacing=0)),
        ("tokens", dict(tokens=10**6)),
        ("tokens", dict(first=(stage(10, 0, 1),))),
        ("tasks", dict(first=(stage(0, 100, 1),))),
        ("matter", dict(first=(stage(10, 100, 11),))),
    ],
)
def test_a_wrong_setting_is_named_when_the_config_is_built(named, wrong):
    settings = dict(split="train", tokens=400) | wrong
    with pytest.raises(ConfigError, match=f"{named}="):
        find_source(Named("lookup", settings), "config.tasks")
