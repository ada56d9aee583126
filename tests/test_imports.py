"""Imports point one way: examples, experiments, launch, benchmarks, planner and cluster and sweeps,
configs, rl_code, models, attention, pallas_kernels.
"""

from __future__ import annotations

import ast
import graphlib
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.syntax import Outline, outline, outline_of

ROOT = Path(__file__).resolve().parents[1]

# From the top of the imports down: the system, what commands and studies add to it, and these.
SYSTEM = {"rl_code", "models", "attention", "pallas_kernels"}
TOOLS = {"planner", "cluster", "sweeps"}
# what each top folder may import of the others; itself is always allowed
ALLOWED = {
    "examples": {"launch", *SYSTEM},
    "launch": {"configs", "benchmarks", "people", *TOOLS, *SYSTEM},
    "experiments": {"benchmarks", "people", *TOOLS, *SYSTEM},
    "benchmarks": {"people", *TOOLS, *SYSTEM},
    "sweeps": {"cluster", *SYSTEM},
    "cluster": SYSTEM,
    "planner": {"configs", *SYSTEM},
    "people": SYSTEM,
    "configs": set(),
    "rl_code": {"models", "attention", "pallas_kernels"},
    "models": {"attention", "pallas_kernels"},
    "attention": {"pallas_kernels"},
    "pallas_kernels": set(),
}
# The packages of rl_code, from the top of the imports down.
ROOMS = (
    *(
        "report",
        "recording",
        "foreign",
        "roles",
        "run",
        "evaluation",
        "redteam",
        "rewards",
        "tasks",
        "rollout",
    ),
    *("learner", "harness", "environment", "weights", "store", "checkpoint", "metrics", "config"),
    *("host", "text", "types"),
)
# What a process runs: files beside the packages.
ROLES = ("train", "act", "prefill", "sft", "schedule")
# folders that may import nothing from outside but this and the standard library
OUTSIDE = {"configs": {"ml_collections"}, "pallas_kernels": {"jax", "numpy"}}
# What a program imports that has an environment of its own (requirements/peers.txt).
OF_PEERS = {
    "benchmarks/peer_trl.py": ("torch", "trl"),
    "rl_code/harness/in_verifiers/episode_sandbox.py": ("verifiers.v1",),
    "rl_code/harness/in_verifiers/in_process.py": ("httpx", "verifiers.v1"),
    "rl_code/rollout/in_vllm/rl_code_vllm.py": ("torch", "vllm"),
}


def sources() -> list[Path]:
    """Every Python file of the top folders."""
    return sorted(path for folder in ALLOWED for path in (ROOT / folder).rglob("*.py"))


def imported(path: Path, found: Outline) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of every import in a file, those inside functions too."""
    for node in found.imports:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = list(path.relative_to(ROOT).parent.parts)
            base = ".".join(
                [*package[: len(package) + 1 - node.level], *filter(None, [node.module])]
            )
            name = base if node.level else node.module
            yield node.lineno, name
            yield from ((node.lineno, f"{name}.{alias.name}") for alias in node.names)
        elif node.args and isinstance(node.args[0], ast.Constant):
            yield node.lineno, node.args[0].value


def violations(path: Path, outlined: Outline) -> list[str]:
    """The imports of a file that its folder may not make."""
    folder = path.relative_to(ROOT).parts[0]
    allowed = ALLOWED[folder]
    # what studies are started by, entry points as those of launch
    if path.name == "__main__.py" or path == ROOT / "experiments" / "__init__.py":
        allowed = ALLOWED["launch"] | {"launch"}
    found = []
    for line, name in imported(path, outlined):
        top = name.split(".")[0]
        if top == folder or top in allowed:
            continue
        outside = (
            folder in OUTSIDE and top not in OUTSIDE[folder] and top not in sys.stdlib_module_names
        )
        if top in ALLOWED or top == "tests" or outside:
            found.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    return found


def test_no_import_points_up():
    assert [problem for path in sources() for problem in violations(path, outline_of(path))] == []


def module_of(path: Path) -> str:
    """The dotted name of a file, as imports say it."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def circle(files: Mapping[str, Outline]) -> list[str]:
    """Modules that import each other in a circle, for their types too; [] where there are none.

    files: the outline of each module. A name that is imported from a package stands for the module
    of that name, not for the package.
    """
    graph: dict[str, set[str]] = {}
    for module, outlined in files.items():
        names = {name for _, name in imported(ROOT / f"{module.replace('.', '/')}.py", outlined)}
        around = {name.rpartition(".")[0] for name in names & files.keys()}
        graph[module] = (names & files.keys()) - around - {module}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_files_import_each_other_in_a_circle():
    assert circle({module_of(path): outline_of(path) for path in sources()}) == []


@pytest.mark.parametrize(
    ("texts", "caught"),
    [
        (("from rl_code.b import x", "from rl_code.a import y"), True),
        (("from rl_code import b", "def f():\n    import rl_code.a"), True),
        (("from rl_code.b import x", "if TYPE_CHECKING:\n    from rl_code.a import Y"), True),
        (("from rl_code import b", "import json"), False),
    ],
)
def test_a_planted_circle_is_caught(texts, caught):
    files = dict(zip(("rl_code.a", "rl_code.b"), map(outline, texts), strict=True))
    assert bool(circle(files)) == caught


def room(name: str) -> str | None:
    """The entry of ROOMS that a module of ``rl_code`` belongs to; None for others and the top."""
    parts = name.split(".")
    if parts[0] != "rl_code" or len(parts) == 1:
        return None
    return "roles" if parts[1] in ROLES else parts[1]


def upward(path: Path, outlined: Outline) -> list[str]:
    """The imports of a file of ``rl_code`` that point up between its packages."""
    own = room(module_of(path))
    found = []
    for line, name in imported(path, outlined):
        other = room(name)
        if own is None or other is None or own == other:
            continue
        if ROOMS.index(other) < ROOMS.index(own):
            found.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    return found


def test_no_import_points_up_between_the_packages_of_rl_code():
    folders = {
        path.name for path in (ROOT / "rl_code").iterdir() if (path / "__init__.py").exists()
    }
    files = {path.stem for path in (ROOT / "rl_code").glob("*.py")} - {"__init__"}
    assert folders | {"roles", "types"} == set(ROOMS) and files == {*ROLES, "types"}
    paths = sorted((ROOT / "rl_code").rglob("*.py"))
    assert [problem for path in paths for problem in upward(path, outline_of(path))] == []


@pytest.mark.parametrize(
    ("file", "text", "caught"),
    [
        ("rl_code/learner/x.py", "from rl_code.run.config import RunConfig", True),
        ("rl_code/learner/x.py", "from rl_code import train", True),
        ("rl_code/environment/x.py", "def f():\n    import rl_code.rewards.combine", True),
        ("rl_code/run/x.py", "if TYPE_CHECKING:\n    from rl_code.schedule import Schedule", True),
        ("rl_code/types.py", "from rl_code.config import named", True),
        ("rl_code/train.py", "from rl_code.recording import fork", True),
        ("rl_code/train.py", "from rl_code.run.run import Run", False),
        ("rl_code/rewards/x.py", "from rl_code.environment.finished import Grade", False),
        ("rl_code/recording/x.py", "from rl_code import sft", False),
    ],
)
def test_a_planted_import_between_packages_is_caught(file, text, caught):
    assert bool(upward(ROOT / file, outline(text))) == caught


@pytest.mark.long
def test_a_run_starts_without_what_only_evaluations_need():
    program = "import sys, launch.train; sys.exit('scipy.stats' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("folder", ["rl_code", "rl_code/recording"])
def test_the_list_of_a_folders_files_has_each_of_them(folder):
    files = {path.name for path in (ROOT / folder).glob("*.py")} - {"__init__.py"}
    listed = re.findall(r"^    .*$", (ROOT / folder / "__init__.py").read_text(), re.MULTILINE)
    assert set(re.findall(r"\w+\.py", "\n".join(listed))) == files


@pytest.mark.parametrize(
    ("file", "text", "caught"),
    [
        ("models/x.py", "import rl_code.types", True),
        ("models/x.py", "from rl_code import types", True),
        ("models/x.py", "def f():\n    from rl_code.types import Task", True),
        ("models/x.py", "from ..rl_code import types", True),
        ("models/x.py", "import importlib\nimportlib.import_module('launch.train')", True),
        ("attention/x.py", "import models.transformer as t", True),
        ("rl_code/learner/x.py", "import launch", True),
        ("rl_code/learner/x.py", "from configs import quickstart", True),
        ("rl_code/learner/x.py", "from tests import helpers", True),
        ("configs/x.py", "from rl_code import config", True),
        ("configs/x.py", "import jax", True),
        ("pallas_kernels/a/x.py", "import flax", True),
        (
            "rl_code/learner/x.py",
            "from .losses import f\nfrom ..types import Task\nimport models.transformer",
            False,
        ),
        (
            "configs/x.py",
            "import math\nimport ml_collections\nfrom configs import quickstart",
            False,
        ),
        (
            "pallas_kernels/a/x.py",
            "from jax.experimental import pallas\nfrom . import reference",
            False,
        ),
        ("launch/x.py", "import rl_code.train, attention.dense", False),
        ("experiments/a/x.py", "from launch import flags", True),
        ("experiments/a/__main__.py", "from launch import flags", False),
        ("experiments/a/x.py", "from planner.flops import matmul_flops", False),
        ("planner/x.py", "from benchmarks.results import save", True),
        ("cluster/x.py", "from launch import flags", True),
        ("cluster/x.py", "from sweeps import runs", True),
        ("sweeps/x.py", "from cluster import ray_role", False),
        ("rl_code/x.py", "from planner import hlo", True),
    ],
)
def test_a_planted_import_is_caught_exactly_when_it_points_up(file, text, caught):
    assert bool(violations(ROOT / file, outline(text))) == caught


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_imports(path):
    for needed in OF_PEERS.get(path.relative_to(ROOT).as_posix(), ()):
        pytest.importorskip(needed)
    assert importlib.import_module(module_of(path)).__file__ == str(path)
