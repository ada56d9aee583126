"""Tools of MCP servers, in real sandboxes: what is listed, called, copied back and refused."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import socket
import time
from pathlib import Path

import pytest

from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.environment.sandbox.config import SandboxConfig
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.servers import stream
from rl_code.environment.servers.mcp_client import ListedTool, McpClient, _listed
from rl_code.environment.tools import mcp
from rl_code.environment.tools.api import check, execute, find_tools
from rl_code.environment.tools.mcp import Mcp
from rl_code.environment.tools.workspace import Workspace
from rl_code.types import Task, ToolCall

# A server by hand, with two pages of tools, which asks its client something in the middle of a call.
# It prints what is no message, and lists a tool whose schema is none.
SERVER = """
import json, os, sys
print("listening on stdio", flush=True)
calls = 0
TEXT = {"type": "string", "description": "A text."}
TOOLS = [
    {"name": "upper", "description": "The text in capitals, into a file.",
     "inputSchema": {"type": "object", "properties": {"text": TEXT, "path": TEXT}, "required": ["text"]}},
    {"name": "add.all", "description": "The sum.",
     "inputSchema": {"type": "object", "properties": {
         "numbers": {"type": "array", "items": {"type": "integer"}},
         "scale": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}},
         "required": ["numbers"]}},
    {"name": "count", "inputSchema": {"type": "object"}},
    {"name": "crash", "inputSchema": {"type": "object"}},
    {"name": "tidy", "inputSchema": {"type": "object"}},
    {"name": "broken", "inputSchema": {"type": "object", "properties": {"n": {"type": "int"}}}},
]
def write(message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)
def text(said, **more):
    return {"content": [{"type": "text", "text": said}], **more}
def run(name, arguments):
    global calls
    calls += 1
    if name == "upper":
        if "path" in arguments:
            open(arguments["path"], "w").write(arguments["text"].upper())
        return text(arguments["text"].upper())
    if name == "add.all":
        return text(str(sum(arguments["numbers"]) * (arguments.get("scale") or 1)))
    if name == "count":
        write({"id": "r", "method": "roots/list"})
        roots = json.loads(sys.stdin.readline())["result"]["roots"]
        return text(f"{calls} calls, {sorted(os.listdir('.'))}, {roots[0]['uri']}, {open('a.py').read()!r}")
    if name == "crash":
        sys.exit(1)
    os.remove("b.py")
    os.mkdir("empty")
    return {**text("x" * 10000), "isError": True}
for line in sys.stdin:
    message = json.loads(line)
    number = message.get("id")
    match message["method"]:
        case "initialize":
            write({"id": number, "result": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                                            "serverInfo": {"name": "own", "version": "1"}}})
        case "tools/list":
            if "cursor" in message["params"]:
                write({"id": number, "result": {"tools": TOOLS[3:]}})
            else:
                write({"id": number, "result": {"tools": TOOLS[:3], "nextCursor": "more"}})
        case "tools/call":
            write({"method": "notifications/progress", "params": {}})
            write({"id": number, "result": run(message["params"]["name"], message["params"]["arguments"])})
"""

# The same with the official package.
OFFICIAL = '''
import sys
sys.path[:0] = {folders!r}
from mcp.server.mcpserver import MCPServer
server = MCPServer("files")
@server.tool()
def shout(text: str, times: int = 1) -> str:
    """The text in capitals."""
    open("said.txt", "w").write(text)
    return text.upper() * times
server.run("stdio")
'''


@pytest.fixture(scope="module")
def sandboxes():
    with SandboxPool(SandboxConfig()) as pool:
        yield pool


@pytest.fixture
def workspace(task, sandboxes, limits):
    task = dataclasses.replace(task, files={"a.py": "a = 1\n", "b.py": ""}, path="a.py")
    limits = dataclasses.replace(limits, command_s=60.0)
    made = Workspace(task, sandboxes, limits, verbose=False)
    yield made
    made.close()


def config(folder: Path, program: str = SERVER, **settings):
    path = folder / "server.py"
    path.write_text(program)
    standard = {
        "server": "own",
        "command": ("python3", "-u", "/opt/programs/server.py"),
        "programs": (str(path),),
        "seconds": 60.0,
    }
    return Named("mcp", {**standard, **settings})


@pytest.fixture(scope="module")
def offered(tmp_path_factory):
    own = config(tmp_path_factory.mktemp("mcp"))
    return find_tools((own, Named("write_file"), Named("terminal"), Named("read_file")))


def use(workspace, tools, name, **arguments):
    call = ToolCall(name, arguments)
    assert check(call, tools) == ""
    return execute(call, tools, workspace)


def test_each_listed_tool_is_offered_under_the_servers_name(offered, tmp_path):
    names = ["own_upper", "own_add_all", "own_count", "own_crash", "own_tidy"]
    assert list(offered)[:6] == [*names, "write_file"]
    schema = offered["own_upper"].schema
    assert schema["description"] == "The text in capitals, into a file."
    assert schema["parameters"]["required"] == ["text"]
    assert offered["own_count"].schema["parameters"]["properties"] == {}
    assert not offered["own_upper"].documents
    some = find_tools((config(tmp_path, only=("count",), answers_are_documents=True),))
    assert list(some) == ["own_count"]
    assert some["own_count"].documents


def test_calls_are_checked_and_written_as_for_any_tool(offered, task):
    for wrong, why in (
        ({}, "missing argument numbers"),
        ({"numbers": "1"}, "must be array, got str"),
        ({"numbers": [1], "scale": 1.5}, "must be integer or null, got float"),
        ({"numbers": [1], "other": 1}, "unknown argument other"),
        ({"numbers": [1e300]}, "out of range"),
        ({"numbers": ["\ud800"]}, "not valid Unicode"),
        ({"numbers": [0] * 20_000}, "more than 10000 values"),
    ):
        assert why in check(ToolCall("own_add_all", wrong), offered)
    deep = []
    for _ in range(100_000):
        deep = [deep]
    assert "nested" in check(ToolCall("own_add_all", {"numbers": deep}), offered)
    text = "<tool_call>\n<function=own_add_all>\n<parameter=numbers>\n[1, 2]\n</parameter>\n"
    text += "<parameter=scale>\nnull\n</parameter>\n</function>\n</tool_call>"
    (call,) = PROTOCOLS["qwen3_coder"].parse(text, task, offered)
    assert call == ToolCall("own_add_all", {"numbers": [1, 2], "scale": None})
    assert '"own_add_all"' in PROTOCOLS["hermes"].prompt(task, offered)
    with pytest.raises(ValueError, match="cannot write numbers of own_add_all"):
        PROTOCOLS["compact"].check_tools(offered)


def test_a_server_stays_and_works_on_the_files_of_the_episode(workspace, offered):
    assert use(workspace, offered, "own_upper", text="b = 2", path="a.py").content == "B = 2"
    assert use(workspace, offered, "read_file", path="a.py").content == "B = 2"
    use(workspace, offered, "write_file", path="a.py", content="c = 3\n")
    use(workspace, offered, "terminal", command="mkdir d; echo 1 > d/e.py")
    counted = use(workspace, offered, "own_count").content
    assert counted == "2 calls, ['a.py', 'b.py', 'd'], file:///workspace, 'c = 3\\n'"
    assert use(workspace, offered, "own_add_all", numbers=[1, 2], scale=3).content == "9"


def test_what_a_server_changes_is_copied_back(workspace, offered):
    refused = use(workspace, offered, "own_tidy")
    assert not refused.ok
    assert len(refused.content) < 500
    assert workspace.paths() == ["a.py"]
    assert use(workspace, offered, "terminal", command="ls -d *").content == "a.py\nempty"
    # and the two are equal afterwards, so the server goes on
    assert use(workspace, offered, "own_count").content.startswith("2 calls, ['a.py', 'empty']")


def test_a_server_that_ends_is_started_again_so_often(workspace, offered):
    for _ in range(4):
        assert use(workspace, offered, "own_count").content.startswith("1 calls")
        crashed = use(workspace, offered, "own_crash")
        assert (crashed.ok, crashed.content) == (False, "own: it has ended")
    assert use(workspace, offered, "own_count").content == "own: it ended 4 times"


def test_a_fork_has_a_server_of_its_own(workspace, offered):
    use(workspace, offered, "own_count")
    fork = workspace.fork()
    try:
        assert use(fork, offered, "own_count").content.startswith("1 calls")
    finally:
        fork.close()
    assert use(workspace, offered, "own_count").content.startswith("2 calls")


def test_the_official_package_serves(workspace, tmp_path):
    try:
        found = importlib.util.find_spec("mcp.server.mcpserver")
    except ModuleNotFoundError:
        found = None
    if found is None:
        pytest.skip("needs the package mcp, version 2")
    packages = Path(found.origin).parents[3]
    beside = [Path(importlib.util.find_spec(name).origin) for name in ("pydantic", "anyio")]
    folders = dict.fromkeys([packages, *(path.parents[1] for path in beside)])
    linked = []
    for number, folder in enumerate(folders):
        linked.append(tmp_path / f"packages{number}")
        os.symlink(folder, linked[-1])
    program = OFFICIAL.format(folders=[f"/opt/programs/{link.name}" for link in linked])
    own = config(tmp_path, program)
    own.settings["programs"] += tuple(map(str, linked))
    tools = find_tools((own,))
    assert list(tools) == ["own_shout"]
    assert use(workspace, tools, "own_shout", text="ab", times=2).content == "ABAB"
    assert workspace.read("said.txt") == "ab"


@pytest.mark.parametrize(
    ("program", "settings", "why"),
    [
        ("import sys; sys.exit('no key')", {}, "does not start: exit code 1: no key"),
        ("import time; time.sleep(600)", {"seconds": 1.0}, "did not answer in time"),
        (
            "print('hello')",
            {},
            "1 lines of its standard output are no messages, the first: b'hello'",
        ),
        (SERVER, {"only": ("lower",)}, "has no tool 'lower'; it has "),
        (SERVER, {"server": "My server"}, "must be lower-case"),
        (SERVER, {"programs": ("/no/such/file",)}, "there is no '/no/such/file'"),
        (SERVER, {"command": ("nothing",)}, "nothing: No such file or directory"),
    ],
)
def test_a_server_that_cannot_be_offered_says_why(tmp_path, program, settings, why):
    with pytest.raises(ConfigError) as caught:
        find_tools((config(tmp_path, program, **settings),))
    assert why in str(caught.value)
    assert "config.tools[0]" in str(caught.value)


ARGS = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
NOTHING = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "properties", "required"),
    [
        (None, {}, []),
        ({}, {}, []),
        ({"$ref": "#/$defs/A", "$defs": {"A": ARGS}}, ARGS["properties"], ["a"]),
        ({"allOf": [ARGS, {"properties": {"b": {}}}]}, {**ARGS["properties"], "b": {}}, ["a"]),
        ({"anyOf": [ARGS, {"type": "object"}]}, ARGS["properties"], []),
        ({"properties": {"a": True, "b": False}}, {"a": {}}, []),
        ({"type": "object", "required": ["x"]}, {"x": {}}, ["x"]),
        ({"type": ["object", "null"], "properties": None}, {}, []),
        ({"additionalProperties": {"type": "integer"}}, {}, []),
        (
            {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": 3},
            {"a": {"$ref": "#/$defs/A"}},
            [],
        ),
    ],
)
def test_arguments_stand_at_the_root_whatever_a_schema_is_made_of(schema, properties, required):
    listed = _listed({"name": "t", "inputSchema": schema})
    assert listed.problem == ""
    assert listed.parameters["properties"] == properties
    assert listed.parameters["required"] == required
    tool = Mcp("own", ("none",))._offer(listed)
    given = {name: "x" for name in required}
    if "additionalProperties" in (schema or {}):
        assert "argument other must be integer" in check(
            ToolCall("own_t", {"other": "x"}), {"own_t": tool}
        )
        given["other"] = 3
    assert check(ToolCall("own_t", given), {"own_t": tool}) == ""
    task = Task("t", ({"role": "user", "content": "go"},))
    for name in ("hermes", "qwen3_coder", "llama3"):
        assert "own_t" in PROTOCOLS[name].prompt(task, {"own_t": tool})


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"properties": {"n": {"type": "int"}}}, "argument n has the unknown type 'int'"),
        ({"properties": {"n": {"anyOf": [{"type": "str"}]}}}, "the unknown type 'str'"),
        ({"properties": {"n": "a number"}}, "argument n has no schema: a number"),
        ({"properties": {"n": False}, "required": ["n"]}, "argument n has no schema"),
        ({"required": [["n"]]}, "requires what is no name"),
        ({"type": "string"}, "not that of an object"),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"type": "array"}}}, "not that of an object"),
        ({"$ref": "https://example.org/a.json"}, "elsewhere: https://example.org/a.json"),
        ({"$ref": "#/$defs/gone", "$defs": {}}, "elsewhere: #/$defs/gone"),
        ({"properties": {"n": {"default": float("nan")}}}, "a number that JSON does not have"),
        ([], "no object"),
        ("object", "no object"),
        ({"a": "x" * 30_000}, "longer than 20000"),
        (
            functools.reduce(lambda inside, _: {"items": inside}, range(500), {}),
            "more than 32 deep",
        ),
    ],
)
def test_what_is_no_schema_is_left_out_with_its_problem(schema, problem, monkeypatch):
    listed = [_listed({"name": name, "inputSchema": schema}) for name in ("bad", "worse")]
    assert problem in listed[0].problem
    listed += [_listed(item) for item in ("text", {"name": "no name"}, {"name": ["a"]}, None)]
    good = [ListedTool(name, "", NOTHING) for name in ("a.b", "a_b", "c")]
    warnings = []
    monkeypatch.setattr(
        mcp.logging, "warning", lambda form, *values: warnings.append(form % values)
    )
    everything = Mcp("own", ("none",))
    assert mcp._chosen(everything, [*listed, *good]) == [good[0], good[2]]
    assert len(warnings) == 7 and problem in warnings[0]
    assert "has no proper name" in warnings[2] and "the same name here" in warnings[-1]
    # only those that are wanted are looked at
    warnings.clear()
    assert mcp._chosen(dataclasses.replace(everything, only=("c",)), [*listed, *good]) == [good[2]]
    assert warnings == []
    with pytest.raises(ValueError, match="the tool 'bad' cannot be offered: "):
        mcp._chosen(dataclasses.replace(everything, only=("bad",)), [*listed, *good])
    with pytest.raises(ValueError, match="no tool that can be offered; bad: "):
        mcp._chosen(everything, listed)
    many = [ListedTool(f"t{n}", "", NOTHING) for n in range(201)]
    with pytest.raises(ValueError, match="lists 201 tools; at most 200 are offered, name them in"):
        mcp._chosen(everything, many)
    assert mcp._chosen(dataclasses.replace(everything, only=("t7",)), many) == [many[7]]


def test_lines_that_are_no_messages_are_passed_over_and_counted(monkeypatch):
    monkeypatch.setattr(stream, "_SKIPPED_BYTES", 1000)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        read = stream.Stream(ours, "lines")
        theirs.sendall(b'Starting up ...\n\n[1, 2]\n{"half": \n\xff\xfe\n  {"id": 1}\r\n')
        assert read.read(time.monotonic() + 60) == {"id": 1}
        assert read.skipped == 4
        assert read.told_skipped.endswith("the first: b'Starting up ...'")
        theirs.sendall(b"x" * 990 + b"\n" + b'{"id": 2}\n')
        with pytest.raises(stream.StreamEnded, match="too much else; 5 lines"):
            read.read(time.monotonic() + 60)
        theirs.close()
        assert read.read(time.monotonic() + 60) == {"id": 2}
        with pytest.raises(stream.StreamEnded, match="it has ended"):
            read.read(time.monotonic() + 60)


def served(*answers) -> McpClient:
    """A client whose server has written these results already, the first behind its introduction."""
    ours, theirs = socket.socketpair()
    for number, result in enumerate(({}, *answers), start=1):
        theirs.sendall(json.dumps({"id": number, "result": result}).encode() + b"\n")
    client = McpClient(stream.Stream(ours, "lines"), "/w", time.monotonic() + 60)
    client.theirs = theirs  # stays open as long as the client
    return client


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "[unreadable]"),
        ({"type": "text", "text": "alone"}, "alone"),
        (None, ""),
        ([{"type": "text", "text": 3}, None], "[text]\n[unreadable]"),
    ],
)
def test_content_that_is_no_list_is_not_lost(content, text):
    client = served({"content": content})
    assert client.call("a", {}, time.monotonic() + 60) == (text, True)


def test_a_server_that_reads_nothing_is_left_at_the_deadline():
    client = served()
    long = {"text": "x" * (1 << 22)}
    with pytest.raises(stream.StreamEnded, match="did not answer in time"):
        client.call("a", long, time.monotonic() - 1)
    with pytest.raises(stream.StreamEnded, match=r"it did not (read|answer) in time"):
        client.call("a", long, time.monotonic() + 0.01)
