"""Tools: what they do to the files, what they say, and what they refuse."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_code.environment.tools.api import check, execute, find_tools
from rl_code.environment.tools.run_tests import describe, failed_case, failed_code
from rl_code.environment.tools.text import cut_middle, one_line, show
from rl_code.environment.tools.workspace import RefusedPath, Workspace
from rl_code.named import Named
from rl_code.types import Case, ToolCall

ALL = find_tools()
GOOD = "def f(x):\n    return [2 * y for y in x]\n"


@pytest.fixture
def workspace(task, pool, limits) -> Workspace:
    return Workspace(task, pool, limits, verbose=False)


def use(workspace, tool, **arguments):
    call = ToolCall(tool, arguments)
    assert check(call, ALL) == ""
    return execute(call, ALL, workspace)


def test_schemas_are_json_and_describe_every_argument():
    for name, tool in ALL.items():
        schema = json.loads(json.dumps(tool.schema))
        assert schema["name"] == name and len(schema["description"]) > 20
        assert set(schema["parameters"]["required"]) <= set(schema["parameters"]["properties"])
        assert all(
            argument["description"] for argument in schema["parameters"]["properties"].values()
        )


@pytest.mark.parametrize(
    ("tool", "arguments", "named"),
    [
        ("nonsense", {}, ["'nonsense'", "run_tests"]),
        ("write_file", {"path": "a"}, ["missing", "content"]),
        ("write_file", {"path": "a", "content": 3}, ["content", "string", "int"]),
        ("read_file", {"path": "a", "first_line": True}, ["first_line", "integer", "bool"]),
        ("submit", {"now": "x"}, ["unknown argument now"]),
    ],
)
def test_wrong_calls_are_named(tool, arguments, named):
    message = check(ToolCall(tool, arguments), ALL)
    assert all(word in message for word in named)


def test_tools_the_task_does_not_list_are_unknown():
    assert "unknown tool" in check(
        ToolCall("terminal", {"command": "ls"}), find_tools((Named("submit"),))
    )


def test_written_text_is_read_back_before_and_after_the_sandbox_opens(workspace, pool):
    use(workspace, "write_file", path="pkg/a.py", content="x = 1\n")
    assert use(workspace, "read_file", path="./pkg/a.py").content == "x = 1\n"
    assert not pool.opened
    use(workspace, "run_tests")
    assert use(workspace, "read_file", path="pkg/a.py").content == "x = 1\n"
    use(workspace, "write_file", path="pkg/a.py", content="x = 2\n")
    assert workspace.snapshot()["pkg/a.py"] == "x = 2\n" and len(pool.opened) == 1


@pytest.mark.parametrize(
    "path",
    ["../a", "/etc/passwd", "a/../../b", "", ".", "a\0b", "..", "//x", "a" * 300, "a/" * 600 + "b"],
)
def test_paths_outside_the_workspace_are_refused(workspace, path):
    before = workspace.snapshot()
    for tool, more in [
        ("read_file", {}),
        ("write_file", {"content": ""}),
        ("edit_file", {"old": "a", "new": "b"}),
    ]:
        result = use(workspace, tool, path=path, **more)
        assert not result.ok and "use a relative path" in result.content
    assert workspace.snapshot() == before


@given(st.text(alphabet="./ab", max_size=12))
def test_resolved_paths_stay_inside(path):
    try:
        resolved = Workspace.resolve(_Dummy(), path)
    except RefusedPath:
        return
    depth = 0
    for part in resolved.split("/"):
        assert part not in ("", ".", "..")
        depth += 1
    assert depth and not resolved.startswith("/")


class _Dummy:
    class task:
        path = "a.py"


def test_a_file_cannot_take_the_place_of_a_folder(workspace):
    use(workspace, "write_file", path="pkg/a.py", content="")
    assert not use(workspace, "write_file", path="pkg", content="").ok
    assert not use(workspace, "write_file", path="pkg/a.py/b", content="").ok


def test_line_ranges_select_lines(workspace):
    read = lambda **lines: use(workspace, "read_file", path="notes.txt", **lines)  # noqa: E731
    assert read(first_line=2).content == "two\nthree\n"
    assert read(last_line=1).content == "one\n"
    assert read(first_line=2, last_line=9).content == "two\nthree\n"
    for lines in [
        {"first_line": 4},
        {"first_line": 3, "last_line": 2},
        {"first_line": 0},
        {"last_line": -1},
    ]:
        result = read(**lines)
        assert not result.ok and "3 lines" in result.content


def test_a_missing_file_is_answered_with_those_there_are(workspace):
    result = use(workspace, "read_file", path="nope.py")
    assert not result.ok and "nope.py" in result.content and "solution.py" in result.content


def test_edit_needs_exactly_one_occurrence(workspace):
    before = workspace.snapshot()
    assert "0 times" in use(workspace, "edit_file", path="notes.txt", old="four", new="4").content
    assert "2 times" in use(workspace, "edit_file", path="notes.txt", old="o", new="0").content
    assert not use(workspace, "edit_file", path="notes.txt", old="", new="x").ok
    assert workspace.snapshot() == before
    assert use(workspace, "edit_file", path="notes.txt", old="two\n", new="").ok
    assert workspace.read("notes.txt") == "one\nthree\n"


def test_test_runs_are_limited_and_counted_down(workspace, limits):
    answers = [use(workspace, "run_tests") for _ in range(limits.test_runs + 1)]
    assert [answer.ok for answer in answers] == [True] * limits.test_runs + [False]
    assert answers[0].content == "FAIL f([1]) gave [1] want [2] left 1"
    assert answers[-1].content.endswith("left 0")
    workspace = Workspace(workspace.task, workspace.pool, limits, verbose=False)
    use(workspace, "write_file", path="solution.py", content=GOOD)
    assert use(workspace, "run_tests").content == "PASS left 1"


def test_terminal_says_output_and_exit_code(workspace):
    assert use(workspace, "terminal", command="echo hi").content == "hi"
    assert use(workspace, "terminal", command="echo hi; exit 3").content == "hi\nexit 3"
    assert use(workspace, "terminal", command="true").content == "exit 0"
    assert not use(workspace, "terminal", command="echo \0").ok


def test_long_answers_say_how_many_passed_and_show_the_first_failures():
    failures = [failed_case("f", Case((i,), i), show(i + 1), "", verbose=True) for i in range(5)]
    text = describe(failures, 7, 1, verbose=True)
    assert all(
        part in text for part in ("2 of 7", "f(2) returned 3, expected 2", "1 test runs left")
    )
    assert "f(3)" not in text


def test_short_answers_stay_on_one_short_line():
    case = Case((list(range(1000)), "a\nb" * 99), {"k" * 500: 1})
    for text in [
        failed_case("f", case, show(list(range(1000))), "", verbose=False),
        failed_case("f", case, "", "TypeError:\n" + "x" * 999, verbose=False),
        failed_code("assert f(\n2) == " + "1" * 999, "AssertionError", verbose=False),
    ]:
        line = describe([text], 3, 2, verbose=False)
        assert "\n" not in line and len(line) < 220 and line.endswith(" left 2")
    assert (
        failed_code("assert f(2) == 4", "AssertionError", verbose=False)
        == "assert f(2) == 4 error AssertionError"
    )


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
        lambda inner: (
            st.lists(inner)
            | st.lists(inner).map(tuple)
            | st.sets(st.integers())
            | st.dictionaries(st.text(), inner)
        ),
        max_leaves=8,
    )
)
def test_shown_values_read_back_as_themselves(value):
    assert eval(show(value), {"inf": math.inf}) == value


def test_sets_are_shown_in_one_order():
    assert show({"b", "a", "c"}) == show({"c", "b", "a"}) == "{'a', 'b', 'c'}"


@given(st.text(), st.integers(4, 40))
def test_cut_texts_fit(text, width):
    line = one_line(text, width)
    assert len(line) <= width and "\n" not in line
    assert len(cut_middle(text, width)) <= max(len(text), width + 40)
