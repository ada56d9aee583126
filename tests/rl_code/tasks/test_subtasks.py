"""Parts of tasks have tests of their own, are what they say, and never belong to another split."""

from __future__ import annotations

import collections
import dataclasses
import random

import pytest

from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.tasks.api import find_source
from rl_code.tasks.demonstrations import DemonstrationConfig, demonstrate
from rl_code.tasks.generated import generate
from rl_code.tasks.programs import evaluate, names_of, split_of
from rl_code.tasks.source import Source
from rl_code.tasks.subtasks import by_places, by_steps
from rl_code.types import Case, Limits, Suite, Task, Tests
from tests.rl_code.environment.conftest import call_here

GENERATED = {"name": "generated", "split": "train", "levels": (3,)}
LIMITS = Limits(turns=3, tokens=600, turn_tokens=120, test_runs=1, command_s=5.0)


def source(**settings):
    return find_source(Named("subtasks", settings), "config.tasks")


def passes(text: str, task: Task, tests: Tests) -> bool:
    results = call_here(text, task.entry_point, [case.args for case in tests.cases])
    pairs = zip(results, tests.cases, strict=True)
    return all(result.ok and result.value == case.expected for result, case in pairs)


def test_the_parts_of_a_program_are_its_beginnings():
    seen = 0
    for index in range(40):
        task = generate("train", 0, index, (3,))
        parts = by_steps(task)
        assert parts == by_steps(task)
        for part in parts:
            seen += 1
            program = part.meta["program"]
            assert 0 < len(program) < len(task.meta["program"])
            assert program == task.meta["program"][: len(program)]
            cases = part.visible_tests.cases + part.hidden_tests.cases
            assert all(evaluate(program, case.args[0]) == case.expected for case in cases)
            # The reference passes, and the start does not.
            for tests in (part.visible_tests, part.hidden_tests):
                assert passes(part.reference["f.py"], part, tests)
                assert not passes(part.files["f.py"], part, tests)
    assert seen > 20


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_no_part_belongs_to_another_split(split):
    parts = [part for i in range(30) for part in by_steps(generate(split, 1, i, (3, 5)))]
    assert {split_of(names_of(part.meta["program"])) for part in parts} <= {split}


def test_the_meta_of_a_generated_task_keeps_its_order():
    task = generate("train", 0, 0)
    assert list(task.meta) == [
        "source", "split", "level", "template", "kind", "stated", "layout", "program", "broken",
    ]  # fmt: skip


def test_a_stream_has_wholes_and_parts_by_the_share():
    tasks = source(of=GENERATED, by="steps", share=0.5).load(None, None)
    found = [tasks[i] for i in range(100)]
    assert found == [tasks[i] for i in range(100)]
    counts = collections.Counter(task.meta["part"] for task in found)
    assert set(counts) == {"whole", "part"} and 20 < counts["part"] < 60
    plain = find_source(Named.from_config(GENERATED, "tasks"), "tasks").load(None, None)
    for task, base in zip(found, plain, strict=False):
        assert task.id == base.id or task.id.startswith(f"{base.id}/first_")
    assert {t.meta["part"] for t in source(of=GENERATED, by="steps", share=0.0).load(None, None)[:9]
            } == {"whole"}  # fmt: skip


def test_parts_of_programs_can_be_demonstrated():
    made = source(of=GENERATED, by="steps", share=1.0)
    assert made.demonstrated and made.endless
    part = next(task for task in made.load(None, None)[:20] if task.meta["part"] == "part")
    right = DemonstrationConfig(p_right=1.0, p_test=0.0)
    said = demonstrate(part, random.Random(0), right, LIMITS)[-1].text
    assert part.reference["f.py"].splitlines()[-1] in said


def several() -> Task:
    """A task whose tests call two functions, and stand in two files of a suite."""
    visible = Tests((Case((1,), 1), Case((2,), 2, target="b.py:g")), ("assert f(3) == 3",))
    suite = Suite(
        {"t/a.py": "", "t/b.py": ""},
        ("t/a.py::x", "t/b.py::y", "t/b.py::z"),
        ("t/a.py::old",),
    )
    hidden = Tests((Case((4,), 4), Case((5,), 5, target="b.py:g")), (), suite)
    message = {"role": "user", "content": "Mend both."}
    files = {"a.py": "", "b.py": ""}
    return Task("two", (message,), files, "a.py", "f", visible, hidden, files, meta={"split": "x"})


def test_parts_by_places_have_the_tests_of_one_place():
    parts = {part.meta["place"]: part for part in by_places(several())}
    assert list(parts) == ["a.py:f", "b.py:g", "t/a.py", "t/b.py"]
    own = parts["a.py:f"]
    assert own.id == "two/a.py:f" and own.reference == several().reference
    assert own.messages[0]["content"] == "Mend both.\n\nDo only this part of it: a.py:f"
    assert own.visible_tests == Tests((Case((1,), 1),), ("assert f(3) == 3",))
    assert own.hidden_tests == Tests((Case((4,), 4),))
    other = parts["b.py:g"]
    assert other.visible_tests == Tests((Case((2,), 2, target="b.py:g"),))
    suite = parts["t/b.py"].hidden_tests.suite
    assert suite.fail_to_pass == ("t/b.py::y", "t/b.py::z")
    assert suite.pass_to_pass == ("t/a.py::old",)
    assert len(parts["t/b.py"].visible_tests) == 0


def test_a_message_with_documents_ends_with_the_request_too():
    task = several()
    content = ({"type": "document", "text": "Mend both."},)
    task = Task(**{**vars(task), "messages": ({"role": "user", "content": content},)})
    asked = by_places(task)[0].messages[0]["content"]
    assert asked[0] == content[0] and asked[1]["text"].endswith("part of it: a.py:f")


def test_a_task_of_one_place_has_no_parts():
    assert by_places(generate("train", 0, 0)) == [] and by_steps(several()) == []


@dataclasses.dataclass(frozen=True)
class Two(Source):
    """A task with a suite of several places, and one with one place."""

    def load(self, pool, workdir):
        return [several(), generate("train", 0, 0)]


def test_a_list_has_its_wholes_and_then_its_parts():
    two = {"name": f"{__name__}:Two"}
    both = source(of=two, by="places").load(None, None)
    assert [task.meta["part"] for task in both] == ["whole"] * 2 + ["part"] * 4
    alone = source(of=two, by="places", whole=False).load(None, None)
    assert alone == both[2:]


@pytest.mark.parametrize(
    ("settings", "match"),
    [({"by": "lines"}, "by"), ({"by": "steps", "share": 2.0}, "share=2.0 must be between")],
)
def test_wrong_settings_are_refused(settings, match):
    with pytest.raises(ConfigError, match=match):
        source(of=GENERATED, **settings)
