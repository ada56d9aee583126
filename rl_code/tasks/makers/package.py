"""A Python package as the world of tasks: fetched, unpacked, without its tests, as a layer.

A source distribution is fetched by its pin and checked against its hash; no code of it runs. The
layer holds everything but what could give an answer away: test files and the data beside them,
archives, bytecode, repositories of version control. Test files are kept apart; each task brings
those that its agent may see.
"""

from __future__ import annotations

import ast
import configparser
import dataclasses
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from rl_code.environment.layers.store import LayerStore
from rl_code.environment.sandbox.inside.world import PACKAGES, WORKSPACE
from rl_code.text import python_source
from rl_code.text.lines import split_lines
from rl_code.types import Layer, World

# The pins of the packages that tasks are made from, and of what runs their tests.
LIST = Path(__file__).with_name("packages.txt")
RUNNER = Path(__file__).with_name("pytest.txt")
# Part of every layer's recipe: a change of what a layer holds gives it another number.
_RECIPE = 1
_TEST_FOLDERS = frozenset({"test", "tests", "testing"})
_TEST_FILES = re.compile(r"(test.*|.*_tests?|tests)\.py")
# Folders at the top of a distribution that hold no package to make tasks from.
_OTHER_FOLDERS = _TEST_FOLDERS | {"docs", "doc", "examples", "example", "benchmarks", "tools"}
_NO_MODULES = frozenset({"setup.py", "conftest.py", "noxfile.py", "tasks.py", "fabfile.py"})
_DROPPED_FOLDERS = frozenset({".git", ".hg", "__pycache__", "build", "dist", ".tox", ".nox"})
_DROPPED_FILES = re.compile(r".*\.(py[co]|so|pyd|whl|egg|zip|gz|bz2|xz|tar|orig|rej|patch|diff)")
# Settings of pytest that change which tests there are; all others are left out.
_COLLECTING = ("python_files", "python_classes", "python_functions")
_LARGEST = 1 << 20
_PIN = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;]+) --hash=sha256:(?P<digest>[0-9a-f]{64})"
)


class PackageError(ValueError):
    """A list of packages that cannot be read, or a package that no tasks can be made from."""


@dataclasses.dataclass(frozen=True)
class Pin:
    """One package of a list."""

    name: str
    version: str
    # SHA-256 of the source distribution, 64 hexadecimal digits.
    digest: str

    @property
    def label(self) -> str:
        """Name and version in one word."""
        return f"{self.name}-{self.version}"


@dataclasses.dataclass(frozen=True)
class Package:
    """A package that tasks can be made from."""

    pin: Pin
    # World that all its tasks start from, without any test.
    world: World
    # Path -> text of the modules that may be changed.
    sources: Mapping[str, str]
    # Path -> text of the test files.
    tests: Mapping[str, str]
    # Path -> text of everything in the layer that is text.
    texts: Mapping[str, str]
    # Names that can be imported from it, as in ``import name``.
    names: tuple[str, ...]


def read_list(text: str) -> list[Pin]:
    """The pins of a list: lines ``name==version --hash=sha256:…``; "#" starts a comment. Raises
    PackageError.
    """
    pins = []
    for number, line in enumerate(split_lines(text), start=1):
        words = " ".join(line.split("#")[0].split())
        if not words:
            continue
        found = _PIN.fullmatch(words)
        if found is None:
            raise PackageError(
                f"line {number}: expected name==version --hash=sha256:<64 hexadecimal digits> of "
                f"a source distribution, found {words[:80]!r}"
            )
        pins.append(Pin(found["name"], found["version"], found["digest"]))
    if not pins:
        raise PackageError("the list names no package")
    names = [pin.name.lower() for pin in pins]
    for name in sorted({name for name in names if names.count(name) > 1}):
        raise PackageError(f"the list names {name} twice")
    return pins


def fetch(pin: Pin, folder: Path) -> Path:
    """The file of a source distribution, in ``folder``; it is fetched if it is not there. Raises
    PackageError, also for a file with another hash.
    """
    known = folder / f"{pin.label}.sdist"
    if not known.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as fresh:
            line = [sys.executable, "-m", "unearth", "--no-binary", "--link-only"]
            line += [*_index(), "--download", fresh, f"{pin.name}=={pin.version}"]
            done = subprocess.run(line, capture_output=True, text=True, check=False)
            files = list(Path(fresh).iterdir())
            if done.returncode or len(files) != 1:
                said = (done.stderr or done.stdout).strip().splitlines()[-3:]
                raise PackageError(
                    f"the source distribution of {pin.label} cannot be fetched: {' '.join(said)}"
                )
            _check(pin, files[0])
            os.replace(files[0], known)
    _check(pin, known)
    return known


def _index() -> list[str]:
    """The package index that pip would ask, if it is told one."""
    url = os.environ.get("PIP_INDEX_URL", "")
    return ["--index-url", url] if url else []


def _check(pin: Pin, file: Path) -> None:
    with open(file, "rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != pin.digest:
        raise PackageError(
            f"the source distribution of {pin.label} has the sha256 {found}, not {pin.digest} as "
            "the list says"
        )


def read(pin: Pin, archive: Path, store: LayerStore, runner: str) -> Package:
    """A package from its source distribution.

    archive: the file. runner: digest of the layer with pytest. Raises PackageError.
    """
    with tempfile.TemporaryDirectory() as work:
        _unpack(pin, archive, Path(work))
        inside = [path for path in Path(work).iterdir() if path.is_dir()]
        if len(inside) != 1:
            raise PackageError(f"{pin.label}: the archive holds {len(inside)} folders, not one")
        tree = inside[0]
        root, names = _importable(tree)
        if not names:
            raise PackageError(f"{pin.label}: the archive holds no package to import")
        files = {path: tree / path for path in _kept(tree)}
        texts = {path: text for path, file in files.items() if (text := _text(file)) is not None}
        tests = {path: text for path, text in texts.items() if _is_test(path, text)}
        if not tests:
            raise PackageError(f"{pin.label}: the source distribution ships no tests")
        layer = {
            path: file
            for path, file in files.items()
            if path not in tests and not _is_test_data(path)
        }
        added = {
            "pytest.ini": _settings(tree),
            # What the package reads of itself, as if it were installed.
            str(
                PurePosixPath(
                    root, f"{pin.name.replace('-', '_')}-{pin.version}.dist-info/METADATA"
                )
            ): (f"Metadata-Version: 2.1\nName: {pin.name}\nVersion: {pin.version}\n"),
        }

        def fill(target: Path) -> None:
            for path, file in layer.items():
                (target / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, target / path)
            for path, text in added.items():
                (target / path).parent.mkdir(parents=True, exist_ok=True)
                (target / path).write_text(text)

        recipe = {"kind": "package of tasks", "sdist": pin.digest, "recipe": _RECIPE}
        digest = store.build({**recipe, "name": pin.label}, fill)
    shown = {path: text for path, text in texts.items() if path in layer}
    sources = {path: text for path, text in shown.items() if _is_source(path, root, names)}
    where = str(PurePosixPath(WORKSPACE, root))
    world = World(
        (Layer(digest, WORKSPACE), Layer(runner, PACKAGES)), environment={"PYTHONPATH": where}
    )
    return Package(pin, world, sources, tests, shown, names)


def _unpack(pin: Pin, archive: Path, target: Path) -> None:
    """Unpacks a source distribution; its files can lead nowhere else. Raises PackageError."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as packed:
                packed.extractall(target)
        else:
            with tarfile.open(archive) as packed:
                packed.extractall(target, filter="data")
    except (tarfile.TarError, zipfile.BadZipFile, OSError, EOFError) as error:
        raise PackageError(f"{pin.label}: the archive cannot be unpacked: {error}") from error


def _importable(tree: Path) -> tuple[str, tuple[str, ...]]:
    """The folder that Python's path must name, and the names of what can be imported there."""
    for root in ("src", "lib", ""):
        folder = tree / root
        if not folder.is_dir():
            continue
        packages = [
            path.parent.name
            for path in folder.glob("*/__init__.py")
            if path.parent.name not in _OTHER_FOLDERS
        ]
        modules = [
            path.stem
            for path in folder.glob("*.py")
            if path.name not in _NO_MODULES and not _TEST_FILES.fullmatch(path.name)
        ]
        if packages or modules:
            return root, tuple(sorted(packages + modules))
    return "", ()


def _kept(tree: Path) -> Iterator[str]:
    """Paths of the files that a layer may hold."""
    for folder, folders, names in os.walk(tree):
        folders[:] = sorted(
            name
            for name in folders
            if name not in _DROPPED_FOLDERS and not name.endswith((".egg-info", ".dist-info"))
        )
        for name in sorted(names):
            path = Path(folder, name)
            if not _DROPPED_FILES.fullmatch(name) and not path.is_symlink():
                if path.stat().st_size <= _LARGEST:
                    yield path.relative_to(tree).as_posix()


def _text(file: Path) -> str | None:
    """The text of a file, None for one that is none."""
    data = file.read_bytes()
    if b"\r" in data or b"\0" in data:  # edits count lines as Python's files have them
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _is_test(path: str, text: str) -> bool:
    """True if a file holds tests that pytest would collect."""
    if not _TEST_FILES.fullmatch(PurePosixPath(path).name):
        return False
    try:
        tree = python_source.parse(text)
    except SyntaxError:
        return False
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return any(
        isinstance(node, functions) and node.name.startswith("test") for node in ast.walk(tree)
    )


def _is_test_data(path: str) -> bool:
    """True if a file may hold expected values: any file in a folder of tests but Python code."""
    parts = PurePosixPath(path).parts
    return bool(_TEST_FOLDERS & set(parts[:-1])) and not path.endswith(".py")


def _is_source(path: str, root: str, names: tuple[str, ...]) -> bool:
    """True if a file is a module of the package itself."""
    if not path.endswith(".py") or not path.startswith(f"{root}/" if root else ""):
        return False
    parts = PurePosixPath(path).relative_to(root).parts
    if _TEST_FOLDERS & set(parts):
        return False
    return parts[0].removesuffix(".py") in names and parts[-1] != "conftest.py"


def _settings(tree: Path) -> str:
    """A pytest.ini, which hides all other settings: only those that say what a test is are kept."""
    own: dict[str, str] = {}
    for name, section in (
        ("pytest.ini", "pytest"),
        ("tox.ini", "pytest"),
        ("setup.cfg", "tool:pytest"),
    ):
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read(tree / name)
        except (configparser.Error, UnicodeDecodeError):
            continue
        if parser.has_section(section):
            own |= dict(parser.items(section))
    try:
        project = tomllib.loads((tree / "pyproject.toml").read_text())
        found = project.get("tool", {}).get("pytest", {}).get("ini_options", {})
        own |= {key: value for key, value in found.items() if isinstance(value, str)}
    except (OSError, ValueError):
        pass
    kept = {key: own[key] for key in _COLLECTING if key in own}
    if "--import-mode=importlib" in own.get("addopts", ""):
        kept["addopts"] = "--import-mode=importlib"
    lines = [f"{key} = {' '.join(value.split())}\n" for key, value in kept.items()]
    return "".join(["[pytest]\n", *lines])
