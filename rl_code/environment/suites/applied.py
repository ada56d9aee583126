"""Part of an agent's work that is laid over a fresh world before its tests run.

Everything but tests, files that configure tests or Python itself, what caches hold, modules that
would stand in for the test framework, installed packages, and programs in folders of PATH. There a
change decides what is tested, and not whether it works. These paths are as the world or the task
has them, and then as the suite brings them.
"""

from __future__ import annotations

import contextlib
import functools
import posixpath
import re
import sys
from collections.abc import Collection, Iterable

from rl_code.environment.sandbox.disposable import OutOfBounds, bounded
from rl_code.environment.sandbox.pool import File, Sandbox, SandboxPool, Snapshot
from rl_code.environment.sandbox.snapshot import folders_of
from rl_code.environment.suites.project import merge
from rl_code.types import Suite, Task

# Names of files, and of folders that are packages of the same name.
_CONFIGURES = {
    *("conftest", "sitecustomize", "usercustomize"),
    *("pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "setup.cfg", "tox.ini"),
}
_PROJECT = "pyproject.toml"
_ENDINGS = (".pth", ".pyc", ".pyo", ".egg-link")
_CACHES = {
    *("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".git"),
}
# Folders that hold installed packages.
_INSTALLED = {"site-packages", "dist-packages"}
_TEST_FOLDERS = {"test", "tests", "testing"}
_TEST_FILE = re.compile(r"test_.*\.py|.*_test\.py")
# At the root of the workspace these would be imported instead of what runs the tests. "test" is
# also what many repositories call their folder of tests.
_FRAMEWORK = {
    *("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "exceptiongroup"),
    *("tomli", "py", "attr", "atomicwrites", "importlib_metadata"),
    *sys.stdlib_module_names - {"test"},
}
# Files that may put folders on Python's path, and how they say so.
_SETTINGS = (
    *("pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "pyproject.toml"),
    *("tox.ini", "setup.cfg", "conftest.py"),
)
_PYTHON_PATH = re.compile(
    r"^[ \t]*pythonpath[ \t]*=[ \t]*(\[[^\]]*\]|[^\n]*(?:\n[ \t]+[^\n]+)*)", re.MULTILINE
)
# Characters of all files pyproject.toml of an agent, and CPU seconds in which they must be read.
_PROJECTS_LONGEST = 1 << 18
_PROJECTS_CPU_S = 2.0


class Base:
    """The files that a task starts from: its own, over the layers of its world."""

    def __init__(self, task: Task, pool: SandboxPool):
        self._task = task
        self._pool = pool
        self._sandbox: Sandbox | None = None
        self._paths: set[str] | None = None

    def text(self, path: str) -> str | None:
        """A file's text; None where there is none that can be read. Raises SandboxFault."""
        if path in self._task.files or self._task.world is None:
            return self._task.files.get(path)
        try:
            return self._open().read_file(path)
        except (OSError, ValueError):
            return None

    def paths(self) -> set[str]:
        """Paths of its files, those in many folders left out where there are thousands. Raises
        SandboxFault.
        """
        if self._task.world is None:
            return set(self._task.files)
        if self._paths is None:
            self._paths = set(self._open().list_files())
        return self._paths

    def _open(self) -> Sandbox:
        if self._sandbox is None:
            self._sandbox = self._pool.open(self._task.files, self._task.world)
        return self._sandbox

    def close(self) -> None:
        """Ends the sandbox in which files were looked up, if there is one."""
        if self._sandbox is not None:
            self._sandbox.close()


def texts_before(task: Task, pool: SandboxPool, paths: Iterable[str]) -> dict[str, str]:
    """The texts of files as an agent finds them: of the task's own, and of those that its world has
    at these paths. Raises SandboxFault.
    """
    with contextlib.closing(Base(task, pool)) as base:
        found = {path: base.text(path) for path in paths}
    return {**task.files, **{path: text for path, text in found.items() if text is not None}}


def applied(
    task: Task, suite: Suite | None, work: Snapshot, base: Base, own: Collection[str] = ()
) -> dict[str, str | File]:
    """The work, without what is not the agent's to change; a snapshot over the task's world.

    suite: the tests that will run; None where they are elsewhere. own: paths that are the agent's
    whatever they are. Raises SandboxFault.
    """
    protects = Protected(task, suite, work, base)
    kept = {path: text for path, text in task.files.items() if path in protects}
    projects = {}
    for path, entry in work.items():
        if path in protects and path not in own:
            continue
        if posixpath.basename(path) == _PROJECT and path not in own:
            projects[path] = (base.text(path) or "", entry if isinstance(entry, str) else "")
        kept[path] = entry
    return kept | _merged(projects)


def laid_over(
    task: Task, files: Snapshot, laid: Iterable[tuple[str, str | None]]
) -> dict[str, str | File]:
    """Files with others laid over them, with the rights that the task knows (``meta["modes"]``: of
    its reference and its suites). None takes a file away.
    """
    result = dict(files)
    modes = task.meta.get("modes", {})
    for path, text in laid:
        if text is not None:
            content = text.encode(errors="surrogatepass")
            result[path] = File(content, modes[path]) if path in modes else text
        elif task.world is None:
            result.pop(path, None)
        else:
            result[path] = File(b"", kind="deleted")
    return result


def deleted(task: Task) -> tuple[str, ...]:
    """Paths that the reference of a task takes away."""
    return tuple(task.meta.get("deleted", ()))


def solved(task: Task) -> dict[str, str | File]:
    """The files of a task with its reference in place."""
    changes = {**task.reference, **dict.fromkeys(deleted(task))}
    return laid_over(task, task.files, changes.items())


class Protected:
    """Paths that an agent cannot change in graded work: ``path in protected``."""

    def __init__(self, task: Task, suite: Suite | None, work: Snapshot, base: Base):
        files = set()
        if suite is not None:
            files = {one.partition("::")[0] for one in suite.ids} | suite.files.keys()
        folders = {folder for path in files for folder in folders_of(path)}
        self._files = files
        # On the way to a file of the suite there may be no link and no file.
        self._folders = folders
        self._tests = {folder for folder in folders if posixpath.basename(folder) in _TEST_FOLDERS}
        # A file that a solution has to change is no test, whatever its name.
        self._solution = set(task.reference) - files
        self._work = work
        self._base = base
        self._suite_files = suite.files if suite is not None else {}
        environment = task.world.environment if task.world else {}
        self._environment = environment.get("PYTHONPATH", "")
        # Folders of the workspace in which programs are looked for.
        self._programs = set()
        for folder in environment.get("PATH", "").split(":") if task.world else ():
            inner = posixpath.relpath(folder, task.world.workspace) if folder else "."
            if not inner.startswith(".."):
                self._programs.add(inner)

    def __contains__(self, path: str) -> bool:
        *above, name = path.split("/")
        names = {part for each in (*above, name) for part in (each, each.removesuffix(".py"))}
        if names & (_CONFIGURES | _CACHES) or name.endswith(_ENDINGS) or self._stands_in(path):
            return True
        if self._is_installed(above, name, path):
            return True
        if path in self._files or path in self._folders:
            return True
        if path in self._solution:
            return False
        in_tests = any(folder in self._tests for folder in (path, *folders_of(path)))
        return in_tests or _TEST_FILE.fullmatch(name) is not None

    def _stands_in(self, path: str) -> bool:
        """True if the path is part of a module that stands in for one of the framework's or
        Python's, and that the task did not bring itself: at the root of the workspace, or in a
        folder that the task's settings put on Python's path.
        """
        if self._stands_at("", path):
            return True
        names = {part.partition(".")[0] for part in path.split("/")[1:]}
        if path in self._solution or not names & _FRAMEWORK:
            return False
        return any(
            path.startswith(f"{root}/") and self._stands_at(f"{root}/", path)
            for root in self._roots
        )

    def _is_installed(self, above: list[str], name: str, path: str) -> bool:
        """True for a program in a folder of PATH, the settings of a virtual environment and what is
        installed in one, and for what stands in the place of such a folder.
        """
        if _INSTALLED & {*above, name} or name == "pyvenv.cfg":
            return True
        if any(f"{folder}/".startswith(f"{path}/") for folder in self._programs):
            return True
        if not above:
            return "." in self._programs and "." not in name
        return posixpath.dirname(path) in self._programs

    @functools.cached_property
    def _roots(self) -> frozenset[str]:
        """Folders that settings of pytest, files of tests or the environment put on the path."""
        found: set[str] = set()
        for path in (*_SETTINGS, *self._files):
            text = self._suite_files.get(path) or self._base.text(path) or ""
            for value in _PYTHON_PATH.findall(text):
                found |= set(re.findall(r"[\w./-]+", value))
            for line in re.findall(r"sys\.path\.(?:insert|append)\((.*)", text):
                found |= set(re.findall(r"[\"']([\w./-]+)[\"']", line))
        found |= {part for part in self._environment.split(":") if not part.startswith("/")}
        roots = {re.sub(r"^(\.{1,2}/)+", "", posixpath.normpath(root)) for root in found if root}
        return frozenset(roots - {".", "..", "/"})

    def _stands_at(self, root: str, path: str) -> bool:
        """True if the path is part of such a module in a folder: "", or a path with a slash at its
        end.
        """
        top, _, below = path[len(root) :].partition("/")
        module, _, ending = top.partition(".")
        if module not in _FRAMEWORK:
            return False
        if not below and ending.rpartition(".")[2] not in ("py", "so") and not self._is_link(path):
            return False
        if below and f"{root}{top}/__init__.py" not in self._work:
            return False
        known = self._base.paths()
        return not any(one == root + top or one.startswith(f"{root}{top}/") for one in known)

    def _is_link(self, path: str) -> bool:
        entry = self._work.get(path)
        return isinstance(entry, File) and entry.kind == "link"


def _merged(projects: dict[str, tuple[str, str]]) -> dict[str, str]:
    """Path -> text of files pyproject.toml: the agent's own, but with the tables ``tool`` of the
    base; those of the base where the agent's cannot be read within bounds. Raises SandboxFault.

    projects: path -> text of the base, and the agent's.
    """
    differing = {path: texts for path, texts in projects.items() if texts[0] != texts[1]}
    merged = {path: before for path, (before, _) in projects.items()}
    if differing and sum(len(own) for _, own in differing.values()) <= _PROJECTS_LONGEST:
        with contextlib.suppress(OutOfBounds):
            merged |= bounded(merge, _PROJECTS_CPU_S, differing)
    return merged
