"""The cost of tools: the tokens that each takes of a prompt, and how long a call takes with one and
with many workspaces open.

Each tool works on generated repositories of --tool_files files. With n workspaces, n threads call
at the same time. The first call in a workspace opens its sandbox, starts what the tool needs and
reads the files; --calls further ones follow. Before each call of ``diagnostics`` and
``semantic_search`` a file is changed, which is not timed. ``sub_agent`` has no time of its own: its
call is as long as what the policy writes.
"""

from __future__ import annotations

import concurrent.futures
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import rich.console
import rich.table
from absl import flags

from benchmarks.layers import memory_kib
from benchmarks.results import define_counts, hardware, save, scratch
from models.tokenizer import Tokenizer
from rl_code.config.named import Named
from rl_code.environment.layers import repository
from rl_code.environment.layers.store import LayerStore
from rl_code.environment.protocols.api import PROTOCOLS
from rl_code.environment.sandbox.inside.world import WORKSPACE
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool
from rl_code.environment.tools.api import execute, find_tools, offered
from rl_code.environment.tools.tool import Tool
from rl_code.environment.tools.workspace import Workspace
from rl_code.run.dry_run import tool_tokens
from rl_code.tasks.repositories import generate
from rl_code.types import Layer, Limits, Task, ToolCall, World

flags.DEFINE_integer("tool_files", 40, "Files of a repository, of tools.", lower_bound=5)
define_counts("workspaces", ["1", "32"], "Workspaces open at the same time, of tools.")
flags.DEFINE_integer("calls", 20, "Further calls in each workspace, of tools.", lower_bound=1)
flags.DEFINE_string("vocabulary", "", "A gguf file or tokenizer.json that counts tokens, of tools.")

_LIMITS = Limits(1000, 100_000, 10_000, 1_000_000, 120.0, tools_s=1e6, tools_cpu_s=1e6)
_MARK = "# mark"
_PROTOCOLS = ("hermes", "qwen3_coder")

# An MCP server that gives back what it got.
_ECHO = """
import json, sys
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        answer = {
            "initialize": {"protocolVersion": "2025-06-18", "capabilities": {}},
            "tools/list": {"tools": [{"name": "echo", "inputSchema": SCHEMA}]},
            "tools/call": {"content": [{"type": "text", "text": "echo"}]},
        }[message["method"]]
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": answer}), flush=True)
"""

Arguments = Callable[[Task, int], Mapping[str, Any]]
# The arguments of the n-th call of each tool.
CALLS: dict[str, Arguments] = {
    "write_file": lambda task, n: {"path": task.path, "content": _marked(task, n)},
    "write_tests": lambda task, n: {"content": f"def test_{n}():\n    assert True\n"},
    "edit_file": lambda task, n: {
        "path": task.path,
        "old": f"{_MARK} {n}\n",
        "new": f"{_MARK} {n + 1}\n",
    },
    "replace_lines": lambda task, n: {"path": task.path, "first_line": 1, "text": f"# {n}"},
    "try_lines": lambda task, n: {"path": task.path, "first_line": 1, "text": f"# {n}"},
    "read_file": lambda task, n: {"path": task.path},
    "terminal": lambda task, n: {"command": "true"},
    "run_tests": lambda task, n: {},
    "grep": lambda task, n: {"pattern": f"def {task.entry_point}"},
    "jump": lambda task, n: {"to": task.entry_point},
    "history": lambda task, n: {"action": "log"},
    "think": lambda task, n: {"thought": "Where is it?"},
    "memory_store": lambda task, n: {"name": "where", "text": f"{n}"},
    "memory_recall": lambda task, n: {"question": "where"},
    "memory_forget": lambda task, n: {"name": "where"},
    "diagnostics": lambda task, n: {},
    "semantic_search": lambda task, n: {"question": task.messages[0]["content"]},
    "mcp_echo": lambda task, n: {"text": "hello"},
    "submit": lambda task, n: {},
}
# Those before which a file is changed.
_FOLLOW_EDITS = ("diagnostics", "semantic_search")
# Those that can be called once.
_LAST = ("submit",)


def main() -> None:
    console = rich.console.Console(width=130)
    with scratch("tools_") as place:
        place.chmod(0o755)
        report = measure(place)
    console.print(table(report))
    console.print(f"load {report['load']}, {report['hardware']}", highlight=False)
    console.print(f"MiB of language servers of a workspace: {report['servers_mib']}")
    save(report)


def measure(place: Path) -> dict:
    """Milliseconds of every call, by tool and by number of workspaces, and tokens of the prompt."""
    options = flags.FLAGS
    server = place / "echo.py"
    server.write_text(_ECHO)
    tools = all_tools(server)
    task = generate("train", 0, 0, files=(options.tool_files, options.tool_files))
    store = LayerStore(place / "store")
    world = World((Layer(make_history(store, place / "git", task), WORKSPACE),))
    report: dict = {
        "hardware": hardware(),
        "load": os.getloadavg()[0],
        "files": options.tool_files,
        "tokens": count_tokens(tools, options.vocabulary) if options.vocabulary else {},
        "times": {},
    }
    with SandboxPool(SandboxConfig(layers=str(store.folder))) as pool:
        for name in CALLS:
            for count in map(int, options.workspaces):
                # of each workspace another repository, as tasks of a batch
                size = (options.tool_files, options.tool_files)
                tasks = [generate("train", 1, number, files=size) for number in range(count)]
                if name == "history":
                    tasks = [change(task, world=world, files={}) for task in tasks]
                report["times"].setdefault(name, {})[count] = time_calls(name, tools, tasks, pool)
        report["servers_mib"] = servers_mib(tools, task, pool)
    return report


def all_tools(server: Path) -> dict[str, Tool]:
    """Every tool, also the one that is not called here, and one of an MCP server's."""
    own = {
        "server": "mcp",
        "command": ("python3", f"/opt/programs/{server.name}"),
        "programs": (str(server),),
    }
    names = [name for name in CALLS if name != "mcp_echo"]
    return find_tools((*map(Named, (*names, "sub_agent")), Named("mcp", own)))


def make_history(store: LayerStore, folder: Path, task: Task) -> str:
    """The layer of a git repository with the files of a task."""
    for path, text in task.files.items():
        folder.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    own = ("-c", "user.name=a", "-c", "user.email=a@b")
    for line in (("init", "-q"), ("add", "."), (*own, "commit", "-qm", "All")):
        subprocess.run(("git", *line), cwd=folder, check=True)
    return repository.build(store, folder, "HEAD")


def count_tokens(tools: Mapping[str, Tool], path: str) -> dict[str, dict[str, int]]:
    """By protocol and by tool, how many tokens its declaration takes of a prompt."""
    read = Tokenizer.from_gguf if path.endswith(".gguf") else Tokenizer.from_file
    tokenizer = read(path)

    def count(protocol: str) -> dict[str, int]:
        written = PROTOCOLS[protocol]
        return tool_tokens(
            lambda task: len(tokenizer.encode(written.prompt(task, offered(task, tools)))),
            list(tools),
        )

    return {protocol: count(protocol) for protocol in _PROTOCOLS}


def time_calls(
    name: str, tools: Mapping[str, Tool], tasks: list[Task], pool: SandboxPool
) -> dict[str, list[float]]:
    """Milliseconds of the first call and of later ones, in a workspace of each task at once."""
    found: dict[str, list[float]] = {"first": [], "later": []}
    together = threading.Barrier(len(tasks))

    def play(task: Task) -> None:
        files = {**task.files, task.path: _marked(task, 0)} if task.world is None else {}
        workspace = Workspace(change(task, files=files), pool, _LIMITS, verbose=True)
        try:
            together.wait()
            for n in range(1 if name in _LAST else 1 + flags.FLAGS.calls):
                if name in _FOLLOW_EDITS:
                    workspace.write(task.path, _marked(task, n))
                call = ToolCall(name, CALLS[name](task, n))
                start = time.perf_counter()
                result = execute(call, tools, workspace)
                spent = 1000 * (time.perf_counter() - start)
                if not result.ok and name != "memory_forget":
                    raise RuntimeError(f"{name} failed: {result.content}")
                found["later" if n else "first"].append(spent)
        finally:
            workspace.close()

    with concurrent.futures.ThreadPoolExecutor(len(tasks)) as threads:
        list(threads.map(play, tasks))
    return found


def servers_mib(tools: Mapping[str, Tool], task: Task, pool: SandboxPool) -> float:
    """Mebibytes of memory that the language servers of a workspace take; what processes share is
    divided among them.
    """
    count = 8
    used = []
    open_ones: list[Workspace] = []
    for wanted in (1, 1 + count):
        while len(open_ones) < wanted:
            open_ones.append(Workspace(task, pool, _LIMITS, verbose=True))
            execute(ToolCall("diagnostics", {}), tools, open_ones[-1])
        used.append(sum(map(memory_kib, pool._beside.values())))
    for workspace in open_ones:
        workspace.close()
    return round((used[1] - used[0]) / count / 1024, 1)


def change(task: Task, **values: Any) -> Task:
    """The task with other values of some fields."""
    return Task(**{**vars(task), **values})


def _marked(task: Task, n: int) -> str:
    """The task's own file with a line that no other call writes."""
    return f"{task.files.get(task.path, '')}\n{_MARK} {n}\n"


def table(report: dict) -> rich.table.Table:
    """Tokens, and median and 95th percentile of the calls, one tool a line."""
    shown = rich.table.Table("tool", *(f"tokens, {one}" for one in report["tokens"]))
    counts = next(iter(report["times"].values()))
    for count in counts:
        for head in ("first", "median", "p95"):
            shown.add_column(f"{head} ms, {count}", justify="right")
    for name, times in report["times"].items():
        row = [str(tokens.get(name, "")) for tokens in report["tokens"].values()]
        for count in counts:
            later = sorted(times[count]["later"])
            row.append(f"{statistics.median(times[count]['first']):.1f}")
            if later:
                row.append(f"{statistics.median(later):.2f}")
                row.append(f"{later[round(0.95 * (len(later) - 1))]:.2f}")
            else:
                row += ["", ""]
        shown.add_row(name, *row)
    for name in {name: None for tokens in report["tokens"].values() for name in tokens}:
        if name not in report["times"]:
            shown.add_row(name, *(str(tokens[name]) for tokens in report["tokens"].values()))
    return shown
