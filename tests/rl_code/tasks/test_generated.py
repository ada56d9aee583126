"""Generated tasks: reproducible, many, solvable, decided by their tests, and split by
composition.
"""

from __future__ import annotations

import functools
import itertools
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_code.tasks.generated import HIDDEN_CASES, LEVELS, VISIBLE_CASES, generate
from rl_code.tasks.operations import NUMBERS, STRUCTURES
from rl_code.tasks.programs import SPLITS, choices, evaluate, split_of


def run_source(files, path, entry_point, args):
    """What the files compute: a value, or the exception raised. The texts are this repository's
    own.
    """
    modules = {}

    def load(name):
        if name not in modules:
            module = modules[name] = types.ModuleType(name)
            names = {**vars(__import__("builtins")), "__import__": lambda wanted, *_: load(wanted)}
            module.__dict__["__builtins__"] = names
            exec(files[f"{name}.py"], module.__dict__)
        return modules[name]

    try:
        return getattr(load(path.removesuffix(".py")), entry_point)(*args)
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        return error


def fails(task, files, tests):
    return any(
        run_source(files, task.path, task.entry_point, case.args) != case.expected
        for case in tests.cases
    )


made = functools.cache(generate)


def some_tasks(split, levels, count, seed=0):
    return [made(split, seed, index, levels) for index in range(count)]


def test_there_are_at_least_50000_distinct_tasks():
    # Two samples of n from N equally likely tasks share n²/N messages on average; unequal chances
    # share more.
    count, least = 800, 50_000
    first, second = (
        {t.messages[0]["content"] for t in some_tasks("train", (1, 2), count, seed)}
        for seed in (1, 2)
    )
    assert len(first) * len(second) / max(1, len(first & second)) > least
    assert len({t.meta["program"] for t in some_tasks("train", (2,), 500)}) > 400


def test_ids_are_distinct():
    tasks = [t for split in SPLITS for seed in (0, 1) for t in some_tasks(split, (1, 2), 20, seed)]
    assert len({task.id for task in tasks}) == len(tasks)


@pytest.mark.parametrize("level", LEVELS)
def test_references_pass_all_tests(level):
    for task in some_tasks("train", (level,), 60):
        assert (
            len(task.visible_tests) == VISIBLE_CASES and len(task.hidden_tests) == HIDDEN_CASES >= 5
        )
        for case in task.visible_tests.cases + task.hidden_tests.cases:
            value = run_source(task.reference, task.path, task.entry_point, case.args)
            assert value == case.expected and type(value) is type(case.expected)


@pytest.mark.parametrize("level", LEVELS)
def test_files_as_given_fail_visible_and_hidden_tests(level):
    kinds = set()
    for task in some_tasks("train", (level,), 60):
        kinds.add(task.meta["kind"])
        assert fails(task, task.files, task.visible_tests) and fails(
            task, task.files, task.hidden_tests
        )
        assert task.files != task.reference and task.path in task.files
    assert kinds == {"write", "repair"}


@pytest.mark.parametrize("level", (1, 2, 3))
def test_a_wrong_constant_or_missing_step_fails_visible_and_hidden_tests(level):
    for task in some_tasks("train", (level,), 100):
        program = task.meta["program"]
        for i, (_, *others) in enumerate(choices(program)):
            for other in others:
                wrong = (*program[:i], other, *program[i + 1 :])
                for tests in (task.visible_tests, task.hidden_tests):
                    assert any(
                        evaluate(wrong, case.args[0]) != case.expected for case in tests.cases
                    ), (program, wrong)


def test_constants_that_pass_the_visible_tests_pass_the_hidden_tests():
    passed_visible = passed_both = 0
    for task in some_tasks("validation", (2,), 200):
        for rival in itertools.product(*choices(task.meta["program"])):
            visible, hidden = (
                all(evaluate(rival, case.args[0]) == case.expected for case in tests.cases)
                for tests in (task.visible_tests, task.hidden_tests)
            )
            passed_visible = passed_visible + visible
            passed_both = passed_both + (visible and hidden)
    assert passed_visible >= 200  # the programs themselves
    assert passed_both == passed_visible


@pytest.mark.parametrize("level", LEVELS)
def test_hidden_inputs_are_not_shown(level):
    for task in some_tasks("test", (level,), 40):
        inputs = [repr(case.args) for case in task.visible_tests.cases + task.hidden_tests.cases]
        assert len(set(inputs)) == len(inputs)
        shown = task.messages[0]["content"]
        assert all(repr(case.args[0]) in shown for case in task.visible_tests.cases)
        assert not any(f"f({case.args[0]!r})" in shown for case in task.hidden_tests.cases)


@pytest.mark.parametrize("levels", [(1, 2), (3,), (4,)])
def test_splits_share_no_composition_and_no_text(levels):
    templates = {}
    messages = {}
    solutions = {}
    for split in SPLITS:
        tasks = some_tasks(split, levels, 300 if levels[0] < 3 else 100)
        templates[split] = {tuple(sorted(task.meta["template"].split("+"))) for task in tasks}
        messages[split] = {task.messages[0]["content"] for task in tasks}
        solutions[split] = {task.reference["f.py"] for task in tasks}
        assert {task.meta["split"] for task in tasks} == {split}
    for one, other in itertools.combinations(SPLITS, 2):
        assert not templates[one] & templates[other]
        assert not messages[one] & messages[other]
        assert not solutions[one] & solutions[other]


def test_every_reordering_of_a_composition_is_in_the_same_split():
    for names in itertools.combinations([operation.name for operation in NUMBERS], 3):
        assert len({split_of(order) for order in itertools.permutations(names)}) == 1


def test_every_operation_occurs_in_training_first_and_last():
    programs = [task.meta["program"] for task in some_tasks("train", (2,), 500)]
    lists = {operation.name for operation in NUMBERS if operation.gives == "ints"}
    assert {program[0][0] for program in programs} == lists
    assert {program[-1][0] for program in programs} == {operation.name for operation in NUMBERS}
    names = {name for task in some_tasks("train", (4,), 400) for name, _ in task.meta["program"]}
    assert names == {operation.name for operation in STRUCTURES}


def test_held_out_splits_have_many_compositions():
    for split in ("validation", "test"):
        assert len({task.meta["template"] for task in some_tasks(split, (1, 2), 400)}) > 50


@settings(deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(SPLITS))
def test_descriptions_state_constants_or_leave_them_out(index, split):
    task = generate(split, 5, index)
    description, *_ = task.messages[0]["content"].splitlines()
    constants = [str(k) for _, k in task.meta["program"] if k is not None]
    digits = [word for word in description.replace(",", "").split() if word.isdigit()]
    unknown = description.replace(",", "").split().count("k")
    assert (digits, unknown) == ((constants, 0) if task.meta["stated"] else ([], len(constants)))


@pytest.mark.parametrize("level", sorted(LEVELS))
def test_tasks_state_their_constants_as_often_as_the_level_says_and_half_are_repairs(level):
    tasks = some_tasks("train", (level,), 150)
    assert abs(sum(task.meta["stated"] for task in tasks) / 150 - LEVELS[level].stated) < 0.1
    assert abs(sum(task.meta["kind"] == "repair" for task in tasks) / 150 - 0.5) < 0.1


def test_messages_show_every_file_and_fit_a_small_context():
    for task in some_tasks("train", tuple(LEVELS), 100):
        message = task.messages[0]["content"]
        assert all(text in message for text in task.files.values())
        level = LEVELS[task.meta["level"]]
        assert not level.named or all(f"# {path}\n" in message for path in task.files)
        assert len(message) < (500 if level.named else max(200, 100 * max(level.steps)))


def test_helpers_live_in_another_file_at_level_5():
    for task in some_tasks("train", (5,), 20):
        assert set(task.files) == set(task.reference) == {"f.py", "h.py"}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("dev", 0, 0), "split='dev'"),
        (("train", 0, 0, ()), "levels=()"),
        (("train", 0, 0, (1, 9)), "levels=(1, 9)"),
    ],
)
def test_unknown_splits_and_levels_are_named(arguments, named):
    with pytest.raises(ValueError) as error:
        generate(*arguments)
    assert named in str(error.value)


def test_generated_tasks_take_the_tools_of_the_config():
    assert generate("train", 0, 0).tools is None
