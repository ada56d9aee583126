"""Tools: what they do to the files, what they say, and what they refuse."""

from __future__ import annotations

import dataclasses
import json
import math
import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_code.config.named import Named
from rl_code.environment.servers.stream import Stream
from rl_code.environment.tools import try_lines
from rl_code.environment.tools.api import check, execute, find_tools
from rl_code.environment.tools.run_tests import describe, failed_case, failed_code
from rl_code.environment.tools.text import cut_middle, one_line, show
from rl_code.environment.tools.tool import Result, Tool, function_schema
from rl_code.environment.tools.workspace import RefusedPath, Workspace
from rl_code.types import Case, Tests, ToolCall

ALL = find_tools()
NUMBERED = find_tools(
    (Named("read_file", {"numbered": True}), Named("replace_lines"), Named("try_lines"))
)
GOOD = "def f(x):\n    return [2 * y for y in x]\n"


@pytest.fixture
def workspace(task, pool, limits) -> Workspace:
    return Workspace(task, pool, limits, verbose=False)


def use(workspace, tool, tools=ALL, **arguments):
    call = ToolCall(tool, arguments)
    assert check(call, tools) == ""
    return execute(call, tools, workspace)


def test_schemas_are_json_and_describe_every_argument():
    for name, tool in (ALL | NUMBERED).items():
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
        ("replace_lines", {"first_line": 1, "text": "b"}),
        ("try_lines", {"first_line": 1, "text": "b"}),
    ]:
        result = use(workspace, tool, ALL | NUMBERED, path=path, **more)
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


def test_edits_keep_the_ends_of_lines(workspace):
    workspace.write("w.txt", "one\r\ntwo\r\nthree\r\n")
    # written with the ends that models write, and copied as they stand
    assert use(workspace, "edit_file", path="w.txt", old="one\ntwo", new="1\n2").ok
    assert workspace.read("w.txt") == "1\r\n2\r\nthree\r\n"
    assert use(workspace, "edit_file", path="w.txt", old="2\r\nthree", new="2\r\n3").ok
    assert use(workspace, "edit_file", path="w.txt", old="1", new="0\n1").ok
    assert workspace.read("w.txt") == "0\r\n1\r\n2\r\n3\r\n"
    # a file whose lines end differently: as they end where the old text stands
    workspace.write("w.txt", "one\r\ntwo\r\n\f\nthree\u2028\n")
    assert use(workspace, "edit_file", path="w.txt", old="one\ntwo", new="1\n2").ok
    assert use(workspace, "edit_file", path="w.txt", old="\f\nthree", new="\f\n3\n").ok
    assert workspace.read("w.txt") == "1\r\n2\r\n\f\n3\n\u2028\n"


def test_numbers_that_a_file_is_shown_with_are_those_of_its_lines(workspace):
    read = lambda **more: use(workspace, "read_file", NUMBERED, path="a.py", **more)  # noqa: E731
    workspace.write("a.py", "import b\n\n\ndef f():\n    return b.g()\n")
    assert read().content == "1:import b\n\n\n4:def f():\n5:    return b.g()\n"
    assert read(first_line=4, last_line=4).content == "4:def f():\n"
    workspace.write("a.py", "")
    assert read().content == "a.py is empty"


@pytest.mark.parametrize(
    ("before", "lines", "text", "after"),
    [
        ("a\nb\nc\n", (2, None), "x", "a\nx\nc\n"),
        ("a\nb\nc\n", (2, None), "x\n", "a\nx\nc\n"),
        ("a\nb\nc\n", (2, None), "x\n\n", "a\nx\n\nc\n"),
        ("a\nb\nc\n", (1, 2), "x\ny\nz", "x\ny\nz\nc\n"),
        ("a\nb\nc\n", (2, 3), "", "a\n"),
        ("a\nb\nc\n", (2, None), "\n", "a\n\nc\n"),
        ("a\nb", (2, 2), "x", "a\nx"),
        ("a\nb", (1, None), "x", "x\nb"),
        ("a\r\nb\r\nc\r\n", (2, None), "x\ny", "a\r\nx\r\ny\r\nc\r\n"),
        ("a\r\nb\r\n", (2, None), "x\r\ny\n", "a\r\nx\r\ny\r\n"),
        ("a\r\nb", (2, None), "x\ny", "a\r\nx\r\ny"),
        ("a\rb\rc", (2, None), "x\n", "a\rx\rc"),
        ("a\n\f\nb\n", (3, None), "x", "a\n\f\nx\n"),
        ("'\u2028'\nb\n", (2, None), "x", "'\u2028'\nx\n"),
    ],
)
def test_lines_are_replaced_by_number(workspace, before, lines, text, after):
    workspace.write("a.py", before)
    arguments = {"first_line": lines[0]} | ({"last_line": lines[1]} if lines[1] else {})
    result = use(workspace, "replace_lines", NUMBERED, path="a.py", text=text, **arguments)
    assert result.ok and result.content == "ok" and workspace.read("a.py") == after


@given(st.lists(st.sampled_from(["a", "", "  b"]), min_size=1), st.data())
def test_replacing_lines_by_themselves_changes_nothing_and_others_stay(lines, data):
    first = data.draw(st.integers(1, len(lines)))
    last = data.draw(st.integers(first, len(lines)))
    files = {"a.py": "".join(f"{line}\n" for line in lines)}
    tool = NUMBERED["replace_lines"]
    place = {"path": "a.py", "first_line": first, "last_line": last}

    def changed(text):
        workspace = _InMemory(files)
        assert tool.run({**place, "text": text}, workspace).ok
        return workspace.read("a.py")

    same = "".join(f"{line}\n" for line in lines[first - 1 : last])
    assert changed(same) == files["a.py"]
    assert changed("new").splitlines() == [*lines[: first - 1], "new", *lines[last:]]


class _InMemory:
    """The files of a workspace, without a sandbox."""

    verbose = False

    def __init__(self, files):
        self._files = dict(files)

    def read(self, path):
        return self._files[path]

    def write(self, path, text):
        self._files[path] = text


@pytest.mark.parametrize("tool", ["replace_lines", "try_lines"])
def test_lines_that_are_not_there_are_named(workspace, tool):
    before = workspace.snapshot()
    for first, last in [(0, 1), (4, 4), (3, 2), (2, 4), (-1, 2)]:
        result = use(
            workspace,
            tool,
            NUMBERED,
            path="notes.txt",
            first_line=first,
            last_line=last,
            text="x",
        )
        assert not result.ok
        assert result.content == f"notes.txt has no lines {first} to {last}; it has 3 lines"
    missing = use(workspace, tool, NUMBERED, path="no.py", first_line=1, text="x")
    assert not missing.ok and "solution.py" in missing.content
    assert workspace.snapshot() == before
    # a call that tries nothing takes no test run
    assert workspace.test_runs_left == workspace.limits.test_runs


def test_long_answers_say_which_lines_were_replaced(workspace):
    workspace.verbose = True
    told = use(workspace, "replace_lines", NUMBERED, path="notes.txt", first_line=1, text="")
    assert told.content == "replaced lines 1 to 1 of notes.txt by 0 lines"


def test_test_runs_are_limited_and_counted_down(workspace, limits):
    answers = [use(workspace, "run_tests") for _ in range(limits.test_runs + 1)]
    assert [answer.ok for answer in answers] == [True] * limits.test_runs + [False]
    assert answers[0].content == "FAIL f([1]) gave [1] want [2] left 1"
    assert answers[-1].content.endswith("left 0")
    workspace = Workspace(workspace.task, workspace.pool, limits, verbose=False)
    use(workspace, "write_file", path="solution.py", content=GOOD)
    assert use(workspace, "run_tests").content == "PASS left 1"


def attempt(workspace, text, path="solution.py"):
    return use(workspace, "try_lines", NUMBERED, path=path, first_line=2, text=text)


def test_lines_that_fail_are_taken_back_and_lines_that_pass_stay(workspace):
    before = workspace.snapshot()
    failed = attempt(workspace, "    return [3 * y for y in x]")
    assert failed.ok and failed.content == "FAIL f([1]) gave [3] want [2] left 1"
    assert workspace.snapshot() == before and workspace.tests_failed is True
    passed = attempt(workspace, "    return [2 * y for y in x]")
    assert passed.ok and passed.content == "PASS left 0"
    assert workspace.read("solution.py") == GOOD and workspace.tests_failed is False


@pytest.mark.parametrize("text", ["    return (", "return x", "    return x.missing"])
def test_lines_that_break_the_file_are_taken_back(workspace, text):
    before = workspace.snapshot()
    assert attempt(workspace, text).content.startswith("FAIL f([1]) error ")
    assert workspace.snapshot() == before


def test_lines_are_taken_back_where_the_tests_cannot_be_run(workspace, monkeypatch):
    before = workspace.snapshot()

    def fails(workspace):
        raise ValueError("no tests")

    monkeypatch.setattr(try_lines, "run_visible", fails)
    result = attempt(workspace, "    return []")
    assert not result.ok and result.content == "try_lines failed: no tests"
    assert workspace.snapshot() == before


def test_without_a_test_run_nothing_is_tried(workspace):
    before = workspace.snapshot()
    workspace.test_runs_left = 0
    result = attempt(workspace, "    return [2 * y for y in x]")
    assert not result.ok and result.content == "left 0" and workspace.snapshot() == before
    workspace.task = dataclasses.replace(workspace.task, visible_tests=Tests())
    result = attempt(workspace, "    return [2 * y for y in x]")
    assert not result.ok and "no visible tests" in result.content
    assert workspace.snapshot() == before


def test_long_answers_say_what_became_of_tried_lines(workspace):
    workspace.verbose = True
    assert attempt(workspace, "    return x").content.endswith("The change was taken back.")
    assert attempt(workspace, GOOD.splitlines()[1]).content.endswith("The change was kept.")


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


def test_answers_hold_no_lone_surrogates(workspace):
    class Half(Tool):
        schema = function_schema("half", "Half a character.", {}, ())

        def run(self, arguments, workspace):
            return Result("a\ud83d")

    result = execute(ToolCall("half", {}), {"half": Half()}, workspace)
    assert result.content == "a?"


def test_messages_of_servers_hold_no_lone_surrogates():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b'{"a": ["\\ud83d", "\\ud83d\\ude00"]}\n')
        read = Stream(ours, "lines").read(time.monotonic() + 60)
        assert read == {"a": ["?", "\U0001f600"]}
