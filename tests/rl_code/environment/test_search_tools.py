"""grep, jump, history and think, in real sandboxes: what they find, bound and refuse."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_code.config.named import Named
from rl_code.environment.layers import repository as repository_layer
from rl_code.environment.layers.store import LayerStore
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.environment.sandbox.config import SandboxConfig
from rl_code.environment.sandbox.pool import File, SandboxPool
from rl_code.environment.tools.api import check, execute, find_tools
from rl_code.environment.tools.workspace import Workspace
from rl_code.types import Layer, Task, Tests, ToolCall, World

FILES = {
    "cart.py": "from tax import rate\n\n\ndef total(xs):\n    return rate(xs) + [1]\n",
    "tax.py": "LIMIT = 3\n\n\ndef rate(xs):\n    return [x for x in xs if x < LIMIT]\n",
    "lib/a/total.py": "class Total:\n    async def rate(self):\n        total = 1\n",
    "data.bin": "total\0",
    "long.txt": "total " * 400 + "\n",
}
TASK = Task("t", (), {"a.py": ""}, "a.py", "f", Tests(), Tests(), {})
NAMES = ("grep", "jump", "history", "think", "read_file", "terminal", "submit")
TOOLS = find_tools(tuple(Named(name) for name in NAMES))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return LayerStore(tmp_path_factory.mktemp("layers"))


@pytest.fixture(scope="module")
def sandboxes(store):
    with SandboxPool(SandboxConfig(layers=str(store.folder))) as pool:
        yield pool


@pytest.fixture
def workspace(task, sandboxes, limits):
    yield from opened(task, sandboxes, limits, FILES)


def opened(task, sandboxes, limits, files, world=None, **meta):
    task = dataclasses.replace(task, files=files, world=world, meta=meta)
    made = Workspace(task, sandboxes, limits, verbose=False)
    yield made
    made.close()


def use(workspace, tool, tools=TOOLS, **arguments):
    call = ToolCall(tool, arguments)
    assert check(call, tools) == ""
    return execute(call, tools, workspace)


def test_grep_finds_lines_in_order_and_keeps_to_its_limits(workspace):
    assert use(workspace, "grep", pattern="def total").content == "cart.py:4: def total(xs):"
    assert use(workspace, "grep", pattern=r"^\s*(async )?def rate").content == (
        "tax.py:4: def rate(xs):\nlib/a/total.py:2: async def rate(self):"
    )
    assert use(workspace, "grep", pattern="rate", path="lib").content.count("\n") == 0
    assert use(workspace, "grep", pattern="nowhere").content == "none"
    few = find_tools((Named("grep", {"most": 1}),))
    assert use(workspace, "grep", few, pattern="rate").content.endswith("rate\n+3")
    # a long line is cut, and what is no text is left out
    found = use(workspace, "grep", pattern="total ").content
    assert "data.bin" not in found and len(found) < 120


def test_words_and_definitions_are_found_alike_in_memory_and_in_the_sandbox(
    task, sandboxes, limits
):
    files = FILES | {
        "lib/zoo.py": "total\n",
        "b/c.py": "a total\n",
        ".git/total": "total\n",
        "b/__pycache__/x": "total\n",
        "many.txt": "".join(f"{'needle' * 40} {i}\n" for i in range(4_000)),
        "wide.py": f"{' ' * 200_000}x\nname:{'a' * 200_000}\nlimit: int = 1\nlimit == 2\n",
    }
    asked = [
        *itertools.product(("total", "def rate", "nowhere"), ("", "lib", "lib/a", "b", "tax.py")),
        *itertools.product(("total",), ("none.py", ".git", "li", "b/__pycache__/x")),
        ("needle", ""),
        ("x < LIMIT", "./tax.py"),
    ]
    names = ("total", "rate", "LIMIT", "limit", "name", "needle", "nowhere")

    def answers(workspace):
        places = [{"path": path} if path else {} for _, path in asked]
        found = [
            use(workspace, "grep", pattern=pattern, **place).content
            for (pattern, _), place in zip(asked, places, strict=True)
        ]
        return found + [use(workspace, "jump", to=name).content for name in names]

    (here,) = [answers(workspace) for workspace in opened(task, Unopened(), limits, files)]
    made = opened(task, sandboxes, limits, files)
    workspace = next(made)
    assert workspace.sandbox and answers(workspace) == here
    made.close()


class Unopened:
    """A pool without sandboxes."""


@pytest.mark.parametrize("pattern", ["(a+)+$", "(x+x+)+y", "(.*)*\\1z"])
def test_an_expression_without_end_costs_the_time_of_one_call(workspace, pattern):
    workspace.write("evil.txt", "a" * 60 + "x" * 60 + "\n")
    quick = find_tools((Named("grep", {"seconds": 0.5}),))
    result = use(workspace, "grep", quick, pattern=pattern, path="evil.txt")
    assert not result.ok and "simpler" in result.content and result.seconds < 5.0
    assert use(workspace, "grep", pattern="def total").ok  # the sandbox lives on


def test_what_is_no_expression_or_leads_out_is_refused_in_words(workspace):
    assert "no regular expression" in use(workspace, "grep", pattern="(").content
    assert "no such file" in use(workspace, "grep", pattern="x", path="none.py").content
    use(workspace, "terminal", command="ln -s /etc out; ln -s / root; mkfifo pipe")
    for path in ("out", "root/etc", "../etc", "/etc", "a/../../b"):
        result = use(workspace, "grep", pattern="root", path=path)
        assert not result.ok, path
    assert use(workspace, "grep", pattern="root:").content == "none"


def test_huge_outputs_are_cut(workspace):
    workspace.write("many.txt", "".join(f"{'needle' * 40} {i}\n" for i in range(4_000)))
    short = use(workspace, "grep", pattern="needle").content
    assert len(short) < 500 and "characters cut" in short and short.endswith("+3988")
    workspace.verbose = True
    wide = find_tools((Named("grep", {"most": 200}),))
    long = use(workspace, "grep", wide, pattern="needle").content
    assert len(long) < 4000 and long.splitlines()[-1].endswith("more lines match")
    shown = len(long.splitlines()) - 1
    assert long.splitlines()[-1] == f"{4_000 - shown} more lines match"


def test_lines_are_counted_as_the_shell_counts_them(task, sandboxes, limits):
    """Form feeds and others end no line, for a search in memory and in the sandbox alike."""
    text = "def alpha():\n    return '\x1c\u2028\x85'\n\n\f\ndef beta():\r\n    return 2\n"
    workspace = next(opened(task, sandboxes, limits, {"a.py": text}))
    assert use(workspace, "grep", pattern="def beta").content == "a.py:5: def beta():"
    told = use(workspace, "terminal", command="grep -n 'def beta' a.py").content
    assert told.startswith("5:def beta")
    assert use(workspace, "grep", pattern="def b[e]ta").content == "a.py:5: def beta():"
    assert use(workspace, "jump", to="beta").content.startswith("a.py:3\n")
    shown = use(workspace, "read_file", path="a.py", first_line=5, last_line=5).content
    assert shown.rstrip() == "def beta():"
    workspace.close()


def test_jump_shows_lines_around_a_place_or_a_definition(workspace):
    assert use(workspace, "jump", to="tax.py:1").content.splitlines()[:2] == [
        "tax.py:1",
        "LIMIT = 3",
    ]
    around = find_tools((Named("jump", {"before": 0, "behind": 1}),))
    assert use(workspace, "jump", around, to="total").content == (
        "cart.py:4\ndef total(xs):\n    return rate(xs) + [1]"
    )
    numbered = find_tools((Named("jump", {"before": 0, "behind": 1, "numbered": True}),))
    assert use(workspace, "jump", numbered, to="total").content == (
        "cart.py:4\n4:def total(xs):\n5:    return rate(xs) + [1]"
    )
    assert use(workspace, "jump", around, to="LIMIT").content.startswith("tax.py:1\nLIMIT = 3")
    several = use(workspace, "jump", around, to="tax.rate").content
    assert several.startswith("tax.py:4") and several.endswith("also lib/a/total.py:2")
    for to, word in {
        "cart.py:99": "5 lines",
        "cart.py:0": "5 lines",
        "../x:1": "outside",
        "none.py:1": "no file",
        "nothing": "no definition",
        "(a+)+$": "path:line or",
        "": "path:line or",
    }.items():
        result = use(workspace, "jump", to=to)
        assert not result.ok and word in result.content, to


def test_think_changes_and_answers_nothing(workspace):
    before = workspace.snapshot()
    assert use(workspace, "think", thought="the cause is in tax.py").content == "ok"
    assert workspace.snapshot() == before
    assert not use(workspace, "think", thought="x" * 4001).ok


def test_history_is_refused_where_there_is_no_repository(workspace):
    for action, of in (("log", ""), ("show", "HEAD"), ("blame", "tax.py"), ("changes", "tax.py")):
        result = use(workspace, "history", action=action, of=of)
        assert not result.ok and "no git repository" in result.content, action


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A repository of three commits, its files, and the names of the commits."""
    folder = tmp_path_factory.mktemp("repository")

    def git(*line: str) -> str:
        who = ("-c", "user.name=Ann", "-c", "user.email=ann@example.org")
        command = ["git", *who, "-c", "core.hooksPath=/dev/null", *line]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q", "-b", "main")
    names = []
    for number in range(3):
        (folder / "tax.py").write_text(f"LIMIT = {number}\nRATE = 1\n")
        git("add", "tax.py")
        git("commit", "-q", "-m", f"Limit {number}")
        names.append(git("rev-parse", "HEAD"))
    files = {
        str(path.relative_to(folder)): File(path.read_bytes(), 0o644)
        for path in folder.rglob("*")
        if path.is_file() and path.parent.name != "hooks"
    }
    files |= {"tax.py": "LIMIT = 1\nRATE = 1\n"}
    return folder, files, names


@pytest.mark.parametrize("layered", [False, True], ids=["files", "layer"])
def test_history_tells_of_the_ancestors_alone(task, sandboxes, limits, repository, store, layered):
    folder, files, (first, middle, last) = repository
    if layered:
        digest = repository_layer.build(store, folder, middle)
        world = World((Layer(digest, "/workspace"),))
        workspace = next(opened(task, sandboxes, limits, {}, world))
    else:
        workspace = next(opened(task, sandboxes, limits, files, base_commit=middle))
    log = use(workspace, "history", action="log").content.splitlines()
    assert [line.partition(": ")[2] for line in log] == ["Limit 1", "Limit 0"]
    shown = use(workspace, "history", action="show", of=first[:8]).content
    assert "Limit 0" in shown and "+LIMIT = 0" in shown
    blame = use(workspace, "history", action="blame", of="tax.py", first_line=1, last_line=2)
    assert blame.content == "~0 1:LIMIT = 1\n2:RATE = 1"
    workspace.verbose = True
    blame = use(workspace, "history", action="blame", of="tax.py")
    assert middle[:7] in blame.content and first[:7] in blame.content
    workspace.verbose = False
    assert use(workspace, "history", action="show", of="~1").content == shown
    changes = use(workspace, "history", action="changes", of="tax.py").content
    assert "-LIMIT = 0" in changes and "LIMIT = 2" not in changes
    for action, of, word in [
        ("show", last, "no commit"),
        *([] if layered else [("show", "HEAD", "no commit")]),
        ("show", "main --all", "names no commit"),
        ("show", "--output=x", "names no commit"),
        ("log", "../x", "outside"),
        ("log", "/etc", "outside"),
        ("blame", "none.py", "none.py"),
        ("push", "", "log, show"),
        ("blame", "", "wants a path"),
    ]:
        result = use(workspace, "history", action=action, of=of)
        assert not result.ok and word in result.content, (action, of, result.content)
    workspace.close()


def test_calls_are_written_and_read_in_every_protocol(task):
    calls = [
        ToolCall("grep", {"pattern": "def total\\b"}),
        ToolCall("grep", {"path": "lib", "pattern": "a|b"}),
        ToolCall("jump", {"to": "tax.py:4"}),
        ToolCall("history", {"action": "blame", "of": "tax.py", "first_line": 1}),
        ToolCall("think", {"thought": "two\nlines"}),
    ]
    compact = PROTOCOLS["compact"]
    compact.check_tools(TOOLS)
    message = compact.message(calls, TOOLS)
    assert compact.parse(message.removesuffix("<|eot|>"), task, TOOLS) == calls
    assert message.startswith("<|call|>grep\ndef total\\b<|end|><|call|>grep lib\na|b<|end|>")
    hermes = PROTOCOLS["hermes"]
    prompt = hermes.prompt(task, TOOLS)
    assert all(f'"{name}"' in prompt for name in NAMES)
    text = (
        '<tool_call>{"name": "grep", "arguments": {"pattern": "def total\\\\b"}}</tool_call>\n'
        '<tool_call>{"name": "jump", "arguments": {"to": "tax.py:4"}}</tool_call>'
    )
    assert hermes.parse(text, task, TOOLS) == [calls[0], calls[2]]


@given(
    st.sampled_from(
        ["grep", "jump", "history", "think", "store", "recall", "forget", "edit", "put"]
    ),
    st.text(alphabet="ab1 :\n=.<|>", max_size=30),
)
def test_whatever_follows_a_word_is_a_call_or_an_error(word, rest):
    names = ("grep", "jump", "history", "think", "memory_store", "memory_recall", "memory_forget")
    tools = find_tools(
        (*map(Named, names), Named("edit_file", {"named": True}), Named("replace_lines"))
    )
    for call in PROTOCOLS["compact"].parse(f"<|call|>{word}{rest}<|end|>", TASK, tools):
        assert call.error or check(call, tools) == "" or "missing argument" in check(call, tools)
