"""Generated repositories: reproducible, many, solvable at the cause alone, split by composition, and
demonstrated in the words of an episode.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import hashlib
import itertools
import random
import sys
import types

import pytest

from rl_code.config.named import Named
from rl_code.environment.grading import grade_work
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.sandbox.config import SandboxConfig
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.tools.api import find_tools
from rl_code.tasks import repositories
from rl_code.tasks.demonstrations import (
    DemonstrationConfig,
    Segment,
    check_demonstrable,
    demonstrate,
)
from rl_code.tasks.programs import SPLITS
from rl_code.tasks.repositories import FAULTS, LEVELS, MOST_FILES, generate
from rl_code.tasks.repository_past import commits_of
from rl_code.tasks.repository_source import Repositories
from rl_code.tasks.row_files import TaskFileError
from rl_code.tasks.walks_in_tools import TOOLS, ToolWords
from rl_code.types import Limits, Task
from tests.rl_code.tasks.walked import assert_said_by_episodes

LIMITS = Limits(turns=16, tokens=2000, turn_tokens=80, test_runs=3, command_s=5.0)
IMPERFECT = DemonstrationConfig(p_right=0.5, p_test=0.7, p_give_up=0.3)


@pytest.fixture(scope="module")
def pool():
    with SandboxPool(SandboxConfig()) as pool:
        yield pool


@pytest.fixture(scope="module")
def tasks() -> dict[int, list[Task]]:
    """Some tasks of every level."""
    return {level: [generate("train", 0, i, (level,)) for i in range(25)] for level in LEVELS}


def call(files, target, args):
    """What a function of the files returns, or the exception raised; the texts are this
    repository's own.
    """
    modules = {}

    def load(name):
        if name not in modules:
            module = modules[name] = types.ModuleType(name)
            names = {**vars(builtins), "__import__": lambda wanted, *_: load(wanted)}
            module.__dict__["__builtins__"] = names
            exec(files[f"{name}.py"], module.__dict__)
        return modules[name]

    path, _, name = target.rpartition(":")
    try:
        return getattr(load(path.removesuffix(".py")), name)(*args)
    except (TypeError, ValueError, IndexError) as error:
        return error


def failing(task, files, tests) -> list[bool]:
    own = f"{task.path}:{task.entry_point}"
    return [call(files, case.target or own, case.args) != case.expected for case in tests.cases]


def test_there_are_at_least_20000_distinct_tasks():
    # Two samples of n from N equally likely tasks share n²/N on average; unequal chances share more.
    first, second = (
        {tuple(sorted(generate("train", seed, i).files.items())) for i in range(250)}
        for seed in (1, 2)
    )
    assert len(first) * len(second) / max(1, len(first & second)) > 20_000


@pytest.mark.long
def test_5000_tasks_differ_in_the_fault_and_in_what_surrounds_it():
    faults, surroundings = set(), set()
    for i in range(5000):
        task = generate("train", 3, i)
        faults.add((task.meta["program"], task.meta["broken"], task.meta["level"]))
        surroundings.add(hash(tuple(sorted(task.files.items()))))
    # of so many faults that 20,000 tasks have more than 18,000
    assert len(surroundings) == 5000 and len(faults) > 4867


@pytest.mark.parametrize("level", LEVELS)
def test_the_reference_passes_and_the_fault_fails_where_it_is_alone(tasks, level):
    for task in tasks[level]:
        repaired = {**task.files, **task.reference}
        (cause,) = task.reference
        assert cause == task.meta["cause"] == task.meta["chain"][level]
        both = (task.visible_tests, task.hidden_tests)
        assert not any(failing(task, repaired, tests) != [False] * len(tests) for tests in both)
        assert all(any(failing(task, task.files, tests)) for tests in both)
        # one line differs
        before, after = task.files[cause].splitlines(), task.reference[cause].splitlines()
        assert sum(a != b for a, b in zip(before, after, strict=True)) == 1
        # what makes up for the fault in another file does not pass
        targets = [case.target for case in task.hidden_tests.cases if case.target]
        assert len(targets) == (2 if level else 0)
        assert all(target.startswith(f"{cause}:") for target in targets)
        if level:
            assert failing(task, task.files, task.hidden_tests)[-2:] == [True, True]


def test_a_grading_in_the_sandbox_agrees(tasks, pool):
    for level in LEVELS:
        for task in tasks[level][:2]:
            assert grade_work(task, {**task.files, **task.reference}, pool, LIMITS).solved
            given = grade_work(task, dict(task.files), pool, LIMITS)
            assert not given.solved and not all(given.visible)


@pytest.mark.parametrize("level", LEVELS)
def test_the_cause_is_as_many_imports_away_as_the_level_says(tasks, level):
    for task in tasks[level]:
        imports = {
            path: {
                f"{node.module}.py"
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.ImportFrom)
            }
            for path, text in task.files.items()
        }
        reached, away = {task.path}, 0
        while task.meta["cause"] not in reached:
            reached |= set().union(*(imports[path] for path in reached))
            away += 1
        assert away == level
        # every file can be imported: there is no cycle
        order: list[str] = []
        while len(order) < len(imports):
            free = [p for p in imports if p not in order and imports[p] <= set(order)]
            assert free
            order += free


def test_messages_show_no_file_and_no_hidden_input(tasks):
    for task in itertools.chain(*tasks.values()):
        message = task.messages[0]["content"]
        assert not any(path in message or path[:-3] in message.split() for path in task.files)
        assert all(f"({case.args[0]!r})" in message for case in task.visible_tests.cases)
        inputs = [repr(case.args) for case in task.visible_tests.cases]
        hidden = [repr(case.args) for case in task.hidden_tests.cases if not case.target]
        assert not set(inputs) & set(hidden) and len(set(hidden)) == len(hidden)
        assert len(task.hidden_tests) == repositories.HIDDEN_CASES


def test_repositories_have_as_many_files_as_asked():
    for files in ((5, 5), (40, 40), (160, 160), (5, 12)):
        counts = [len(generate("test", 0, i, files=files).files) for i in range(4)]
        assert all(files[0] <= count <= files[1] for count in counts)
    assert MOST_FILES == 160


def test_functions_of_a_chain_are_alone_in_their_files_where_asked():
    def functions(task, path):
        return task.files[path].count("def ")

    alone = [generate("test", 0, i, alone=True) for i in range(20)]
    assert all(functions(task, path) == 1 for task in alone for path in task.meta["chain"])
    others = {path for task in alone for path in task.files if path not in task.meta["chain"]}
    assert others and any(functions(task, path) > 1 for task in alone for path in task.files)
    crowded = [generate("test", 0, i) for i in range(20)]
    assert any(functions(task, path) == 2 for task in crowded for path in task.meta["chain"])


def test_splits_share_no_composition_and_no_message():
    found = {split: [generate(split, 0, i) for i in range(80)] for split in SPLITS}
    templates = {
        split: {tuple(sorted(task.meta["template"].split("+"))) for task in tasks}
        for split, tasks in found.items()
    }
    messages = {s: {task.messages[0]["content"] for task in tasks} for s, tasks in found.items()}
    for one, other in itertools.combinations(SPLITS, 2):
        assert not templates[one] & templates[other] and not messages[one] & messages[other]
    assert all(len(one) > 40 for one in templates.values())


def test_names_are_of_nothing_else():
    modules, functions = repositories._MODULES, repositories._FUNCTIONS
    assert len(set(modules)) == len(modules) >= 40
    assert len(set(functions)) == len(functions)
    assert not set(modules) & set(functions)
    assert not set(modules) & set(sys.stdlib_module_names)
    assert not {*modules, *functions} & {*vars(builtins), "xs", "x"}
    assert all(name.isidentifier() and not name.startswith("_") for name in functions)
    for name in (*modules, *functions):
        ast.parse(f"{name} = 1")  # no keyword


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("dev", 0, 0), "split='dev'"),
        (("train", 0, 0, (4,)), "levels=(4,)"),
        (("train", 0, 0, (1,), (3, 12)), "files=(3, 12)"),
        (("train", 0, 0, (1,), (12, 5)), "files=(12, 5)"),
        (("train", 0, 0, (1,), (5, 12), True, ("names",)), "faults=('names',)"),
        (("train", 0, 0, (0, 3), (5, 5), True, ("name",)), "files=(5, 5) must reach 6: at level 3"),
    ],
)
def test_impossible_settings_are_named(arguments, named):
    with pytest.raises(ValueError) as error:
        generate(*arguments)
    assert named in str(error.value)
    source = Repositories("test", levels=(3,), files=(6, 6), alone=True)
    assert source.load(None, None)[5] == generate("test", 0, 5, (3,), (6, 6), alone=True)


# --- Demonstrations -------------------------------------------------------------------------------


def walks(tasks, config=IMPERFECT, limits=LIMITS) -> list[tuple[Task, list[Segment]]]:
    every = list(itertools.chain(*tasks.values()))
    return [(t, demonstrate(t, random.Random(i), config, limits)) for i, t in enumerate(every)]


def calls_of(task, segments, tools=TOOLS):
    texts = [segment.text.removesuffix("<|eot|>") for segment in segments if segment.sampled]
    return [call for text in texts for call in Compact().parse(text, task, tools)]


EDITS = ("replace_lines", "try_lines")


def number_in(thought) -> int:
    """The number of the line of which a line of a thought is."""
    return int(thought.split(" | ")[1].partition(":")[0])


def with_edit(task, call) -> dict[str, str]:
    """The files of a task with the lines of a call in their place."""
    path, line, text = (call.arguments[name] for name in ("path", "first_line", "text"))
    lines = task.files[path].splitlines()
    lines[line - 1] = text
    return {**task.files, path: "\n".join([*lines, ""])}


def test_a_walk_searches_reads_along_the_chain_edits_and_submits(tasks):
    restarts = 0
    for task, segments in walks(tasks):
        calls = calls_of(task, segments)
        assert not any(call.error for call in calls)
        names = [call.name for call in calls if call.name != "think"]
        assert names[:2] == ["grep", "read_file"] and names[-1] == "submit"
        assert set(names[2:-1]) <= {"read_file", *EDITS} and names[-2] in EDITS
        # what is put in its place untested is submitted at once
        assert "replace_lines" not in names[:-2]
        assert names.count("try_lines") <= LIMITS.test_runs
        assert sum(segment.sampled for segment in segments) <= LIMITS.turns
        chain = list(task.meta["chain"])
        read: list[str] = []
        for call in calls:
            if call.name == "read_file":
                # along the chain, or again from its beginning
                path = call.arguments["path"]
                restarts += bool(read) and path == chain[0]
                read = [path] if path == chain[0] else [*read, path]
                assert read == chain[: len(read)]
            if call.name in EDITS:
                assert call.arguments["path"] == read[-1]
            if call.name == "think":
                # of each line of what was read last
                thought = call.arguments["thought"]
                numbers = [number_in(line) for line in thought.split("\n")]
                places = task.meta["places"]
                assert numbers == [n for path, n in reversed(places) if path == read[-1]]
        # a thought stands in front of what follows from it
        behind = {after.name for call, after in itertools.pairwise(calls) if call.name == "think"}
        assert behind <= {"read_file", *EDITS}
    assert restarts > 20


def test_what_is_learned_is_right_and_what_is_not_learned_is_wrong(tasks):
    wrong = 0
    for task, segments in walks(tasks):
        asked = task.messages[0]["content"].split("\n")[0].partition(": ")[2].split(", ")
        letter = asked[-1 - task.meta["fault"]].split()[0]
        for segment in segments:
            assert segment.learned or segment.sampled
            if not segment.sampled:
                continue
            # what it says of each line, and what it does about it
            calls = calls_of(task, [segment])
            thoughts = [call.arguments["thought"] for call in calls if call.name == "think"]
            lines = "\n".join(thoughts).split("\n") if thoughts else []
            right = all(line.removeprefix("- ").split(" | ")[0] in asked for line in lines)
            faults = [number_in(line) for line in lines if line.endswith(" no")]
            edits = [call for call in calls if call.name in EDITS]
            if edits:
                right &= with_edit(task, edits[0]) == {**task.files, **task.reference}
                assert faults == [edits[0].arguments["first_line"]]
            elif thoughts:
                assert not faults
                # the fault is overlooked
                right &= not any(line.startswith(f"- {letter} ") for line in lines)
            assert segment.learned == right
            wrong += not right
    assert wrong > 20


def test_a_guess_changes_a_line_of_what_was_just_read_without_a_thought(tasks):
    always = DemonstrationConfig(p_right=0.5, p_test=1.0, p_give_up=0.0, p_guess=1.0)
    solved = 0
    for task, segments in walks(tasks, always):
        assert all(segment.learned for segment in segments)
        calls = calls_of(task, segments)
        assert [call.name for call in calls] == ["grep", "read_file", "replace_lines", "submit"]
        assert calls[2].arguments["path"] == calls[1].arguments["path"] == task.meta["chain"][0]
        changed = with_edit(task, calls[2])
        assert changed != task.files
        solved += changed == {**task.files, **task.reference}
    # where the fault is in the first file, it is hit now and then
    assert 0 < solved < len(tasks[0])
    sometimes = dataclasses.replace(IMPERFECT, p_guess=0.3)
    guesses, depths = 0, set()
    for task, segments in walks(tasks, sometimes):
        calls = calls_of(task, segments)
        for before, call in itertools.pairwise(calls):
            if call.name == "replace_lines" and before.name == "read_file":
                guesses += 1
                depths.add(task.meta["chain"].index(before.arguments["path"]))
    assert guesses > 20 and depths >= {0, 1, 2}


def test_a_walk_without_mistakes_hands_in_the_reference(tasks):
    perfect = DemonstrationConfig(p_right=1.0, p_test=1.0, p_give_up=0.0)
    for task, segments in walks(tasks, perfect):
        (edit,) = [call for call in calls_of(task, segments) if call.name in EDITS]
        assert with_edit(task, edit) == {**task.files, **task.reference}
        assert "PASS left 2" in segments[-2].text


def test_the_tests_say_what_wrong_attempts_come_to(tasks):
    wrong = DemonstrationConfig(p_right=0.0, p_test=1.0, p_give_up=0.0)
    limits = dataclasses.replace(LIMITS, turns=30, test_runs=6)
    failed = 0
    for task, segments in walks(tasks, wrong, limits):
        calls = calls_of(task, segments)
        tried = [with_edit(task, call) for call in calls if call.name == "try_lines"]
        told = [s.text for s in segments if not s.sampled and " left " in s.text]
        for files, text in zip(tried, told, strict=True):
            assert ("FAIL" in text) == any(failing(task, files, task.visible_tests))
            failed += "FAIL" in text
    assert failed > 50


def test_walks_say_what_an_episode_says(tasks, pool):
    pairs = [
        (task, demonstrate(task, random.Random(i), IMPERFECT, LIMITS))
        for i, task in enumerate(itertools.chain(*(tasks[level][:3] for level in LEVELS)))
    ]
    assert_said_by_episodes(pairs, Compact(), TOOLS, pool, LIMITS)


def test_without_grep_walks_ask_the_semantic_search(pool):
    tools = {name: tool for name, tool in TOOLS.items() if name not in ("grep", "terminal")}
    check_demonstrable(Compact(), tools, ("repositories",))
    other = find_tools((Named("semantic_search", {"most": 3}),))
    with pytest.raises(ValueError, match=r"SemanticSearch\(most=3"):
        check_demonstrable(Compact(), tools | other, ("repositories",))
    check_demonstrable(Compact(), TOOLS | other, ("repositories",))  # grep is asked, so it is free
    pairs = []
    for index, files in enumerate((5, 10, 40)):
        task = generate("train", 3, index, (1,), (files, files))
        segments = demonstrate(
            task, random.Random(index), IMPERFECT, LIMITS, words=ToolWords(tools)
        )
        assert "find\n" in segments[1].text
        assert f"{task.meta['chain'][0]}:" in segments[2].text.splitlines()[0]
        pairs.append((task, segments))
    assert_said_by_episodes(pairs, Compact(), tools, pool, LIMITS)


def test_without_read_file_walks_jump_along_the_chain(tasks, pool):
    """With line numbers; where ``jump`` shows none, the terminal reads."""
    tools = {name: tool for name, tool in TOOLS.items() if name not in ("read_file", "terminal")}
    check_demonstrable(Compact(), tools, ("repositories",))
    other = find_tools((Named("jump"),))
    with pytest.raises(ValueError, match="call read_file"):
        check_demonstrable(Compact(), tools | other, ("repositories",))
    with_terminal = tools | other | find_tools((Named("terminal"),))
    check_demonstrable(Compact(), with_terminal, ("repositories",))
    words = ToolWords(with_terminal)
    texts = [
        one.text
        for one in demonstrate(tasks[1][0], random.Random(0), IMPERFECT, LIMITS, words=words)
    ]
    assert any("grep -n ." in text for text in texts) and not any("jump" in text for text in texts)
    pairs = []
    for index, task in enumerate((tasks[1][0], tasks[3][0])):
        right = dataclasses.replace(IMPERFECT, p_right=1.0)
        segments = demonstrate(task, random.Random(index), right, LIMITS, words=ToolWords(tools))
        jumps = [call.arguments["to"] for call in calls_of(task, segments) if call.name == "jump"]
        assert jumps == list(task.meta["functions"][: task.meta["level"] + 1])
        pairs.append((task, segments))
    assert_said_by_episodes(pairs, Compact(), tools, pool, LIMITS)
    misnamed = generate("train", 3, 0, faults=("name",))
    with pytest.raises(ValueError, match="does not see the imports"):
        demonstrate(misnamed, random.Random(0), IMPERFECT, LIMITS, words=ToolWords(tools))


def test_with_diagnostics_walks_check_names_first(pool):
    names = ("grep", "diagnostics", "read_file", "replace_lines", "submit")
    tools = {name: tool for name, tool in TOOLS.items() if name in names}
    tools |= find_tools((Named("diagnostics"),))
    check_demonstrable(Compact(), tools, ("repositories",))
    other = tools | find_tools((Named("diagnostics", {"most": 3}),))
    given = (random.Random(0), IMPERFECT, LIMITS)
    demonstrate(generate("train", 3, 0), *given, words=ToolWords(other))  # it is not called
    with pytest.raises(ValueError, match=r"Diagnostics\(.*most=3"):
        demonstrate(generate("train", 3, 0, faults=FAULTS), *given, words=ToolWords(other))
    found = {"name": [], "operation": []}
    for index in range(8):
        task = generate("train", 3, index, faults=FAULTS)
        found["name" if task.meta["misnamed"] else "operation"].append(task)
    pairs = []
    for kind, some in found.items():
        for index, task in enumerate(some[:3]):
            right = dataclasses.replace(IMPERFECT, p_right=1.0)
            words = ToolWords(tools)
            segments = demonstrate(task, random.Random(index), right, LIMITS, words=words)
            calls = calls_of(task, segments, tools)
            called = [call.name for call in calls]
            files = task.meta["level"] + 1
            behind = ["read_file"] if kind == "name" else ["grep", *["read_file"] * files]
            assert called == ["diagnostics", *behind, "replace_lines", "submit"]
            assert with_edit(task, calls[-2]) == {**task.files, **task.reference}
            pairs.append((task, segments))
    # the servers start for the first check
    assert_said_by_episodes(pairs, Compact(), tools, pool, LIMITS)


def test_a_wrong_name_is_nowhere_defined_and_the_reference_mends_it():
    made = [
        generate("train", 5, index, (level,), (6, 8), index % 2 == 0, ("name",))
        for index, level in enumerate((*LEVELS, *LEVELS))
    ]
    # "ice" is wrong, which is the end of the name of another function of the file
    made.append(generate("test", 1, 19, (0, 1, 2), (5, 8), faults=("name",)))
    assert "juice(" in made[-1].files[made[-1].meta["cause"]]
    for level, task in zip((*LEVELS, *LEVELS, 0), made, strict=True):
        wrong, right = task.meta["misnamed"]
        assert not any(f"def {wrong}(" in text for text in task.files.values())
        assert any(f"def {right}(" in text for text in task.files.values())
        cause = task.meta["cause"]
        assert task.meta["chain"].index(cause) == level and set(task.reference) == {cause}
        assert task.reference[cause] == task.files[cause].replace(f" {wrong}(", f" {right}(")
        for tests in (task.visible_tests, task.hidden_tests):
            with pytest.raises(NameError, match=wrong):
                failing(task, task.files, tests)
            assert not any(failing(task, {**task.files, **task.reference}, tests))


def test_tasks_are_those_of_before_there_were_wrong_names():
    made = [generate("train", 0, index) for index in range(20)]
    assert not any(task.meta["names_may_be_wrong"] or task.meta["misnamed"] for task in made)
    texts = repr([(task.id, task.messages, task.files, task.reference) for task in made])
    assert hashlib.sha256(texts.encode()).hexdigest()[:16] == "55a7e9de3cbfdd5a"


@pytest.fixture
def layered(tmp_path):
    with SandboxPool(SandboxConfig(layers=str(tmp_path / "layers"))) as pool:
        yield pool


def test_with_a_past_one_of_the_last_commits_made_the_fault_and_others_changed_other_lines():
    counts = set()
    for index in range(30):
        faults = FAULTS if index % 2 else FAULTS[:1]
        task = generate("train", 0, index, (0, 1, 2), (5, 8), faults=faults, changes=(2, 5))
        plain = generate("train", 0, index, (0, 1, 2), (5, 8), faults=faults)
        assert plain.meta["past"] == () and plain.files == task.files
        past = task.meta["past"]
        counts.add(len(past))
        assert len({(path, number) for path, number, _ in past}) == len(past)
        states = [commit.files for commit in commits_of(task)]
        assert states[-1] == task.files and len(states) == len(past) + 1
        for before, after, (path, number, line) in zip(states, states[1:], past, strict=False):
            # one line of one file, which means something else
            assert {p for p in after if before[p] != after[p]} == {path}
            lines = before[path].splitlines(), after[path].splitlines()
            assert [i for i, (a, b) in enumerate(zip(*lines, strict=True), 1) if a != b] == [number]
            assert lines[0][number - 1] == line
            ast.parse(before[path])
        # one of them made the fault
        cause = task.meta["cause"]
        texts = task.reference[cause].splitlines(), task.files[cause].splitlines()
        (number,) = (i for i, (a, b) in enumerate(zip(*texts, strict=True), 1) if a != b)
        assert (cause, number, texts[0][number - 1]) in past
    assert counts == {2, 3, 4, 5}
    with pytest.raises(ValueError, match=r"changes=\(0, 3\) must be"):
        generate("train", 0, 0, changes=(0, 3))
    with pytest.raises(ValueError, match=r"changes=\(1, 6\) must be"):
        Repositories("train", changes=(1, 6))


def test_with_history_walks_see_which_lines_were_changed_and_think_of_these(layered):
    settings = dict(files=(5, 8), alone=True, changes=(3, 5))
    names = ("terminal", "grep", "think", "replace_lines", "submit")
    tools = {name: tool for name, tool in TOOLS.items() if name in names}
    tools |= find_tools((Named("history"),))
    check_demonstrable(Compact(), tools, ("repositories",))
    played = Repositories("train", (0, 1, 2), **settings).load(layered, None)
    told = Repositories("train", (0, 1, 2), **settings, built=False).load(None, None)
    words = ToolWords(tools)
    pairs = []
    for index in range(5):
        task = played[index]
        assert dataclasses.replace(task, world=None) == told[index] and task.world is not None
        right = dataclasses.replace(IMPERFECT, p_right=1.0)
        segments = demonstrate(told[index], random.Random(index), right, LIMITS, words=words)
        calls = calls_of(task, segments, tools)
        blamed = [call.arguments["of"] for call in calls if call.name == "history"]
        assert blamed == list(task.meta["chain"][: task.meta["level"] + 1])
        changed = {(path, number) for path, number, _ in task.meta["past"]}
        for call, before in zip(calls[1:], calls, strict=False):
            if call.name == "think":
                path = before.arguments["of"]
                numbers = {number_in(line) for line in call.arguments["thought"].split("\n")}
                steps = {place for place in task.meta["places"] if place[0] == path}
                assert {(path, number) for number in numbers} == changed & steps
        assert with_edit(task, calls[-2]) == {**task.files, **task.reference}
        pairs.append((task, segments))
    # git itself says who changed which line
    assert_said_by_episodes(pairs, Compact(), tools, layered, LIMITS)
    work = {**pairs[0][0].files, **pairs[0][0].reference}
    assert grade_work(pairs[0][0], work, layered, LIMITS).solved
    with pytest.raises(TaskFileError, match=r"name the folder of a layer store as sandbox\.layers"):
        Repositories("train", (0,), **settings).load(None, None)


def test_tools_that_speak_otherwise_are_refused():
    names = ("grep", "read_file", "think", "replace_lines", "try_lines", "submit")
    with pytest.raises(ValueError, match="numbered=True"):
        check_demonstrable(Compact(), find_tools(tuple(map(Named, names))), ("repositories",))
    few = TOOLS | find_tools((Named("grep", {"most": 3}),))
    with pytest.raises(ValueError, match=r"Grep\(most=3"):
        check_demonstrable(Compact(), few, ("repositories",))
    silent = find_tools((Named("grep"), Named("try_lines"), Named("submit")))
    with pytest.raises(ValueError, match="call read_file, replace_lines, and the config has grep"):
        check_demonstrable(Compact(), silent, ("repositories",))
    with pytest.raises(ValueError, match="call submit"):
        check_demonstrable(Compact(), find_tools((Named("terminal"),)), ("repositories",))
    check_demonstrable(Compact(), TOOLS, ("repositories",))


def test_too_few_turns_are_named(tasks):
    limits = Limits(turns=5, tokens=900, turn_tokens=80, test_runs=3, command_s=5.0)
    with pytest.raises(ValueError, match=r"limits\.turns=5 must be at least [67] for"):
        demonstrate(tasks[3][0], random.Random(0), IMPERFECT, limits)


def test_walks_check_names_rarely_and_in_vain():
    tools = {
        **{name: TOOLS[name] for name in ("grep", "read_file", "replace_lines", "submit")},
        **find_tools((Named("diagnostics"),)),
    }
    tasks = [generate("train", 3, index, faults=("name",)) for index in range(30)]

    def first_calls(**changed):
        config = dataclasses.replace(IMPERFECT, p_right=1.0, **changed)
        found = []
        for index, task in enumerate(tasks):
            words = ToolWords(tools)
            segments = demonstrate(task, random.Random(index), config, LIMITS, words=words)
            found.append([call.name for call in calls_of(task, segments, tools)])
        return found

    always = first_calls()
    assert all(calls[:2] == ["diagnostics", "read_file"] for calls in always)
    assert all("diagnostics" not in calls for calls in first_calls(p_check=0.0))
    assert all(calls[:2] == ["diagnostics", "grep"] for calls in first_calls(p_heed=0.0))
    rarely = sum("diagnostics" in calls for calls in first_calls(p_check=0.2))
    assert 2 <= rarely <= 12
    # what is certain draws nothing, so that walks of before stay what they were
    assert always == first_calls(p_check=1.0, p_heed=1.0)
