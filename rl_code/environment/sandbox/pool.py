"""Sandboxes for code that nobody has read: one per episode, opened in milliseconds.

A pool keeps a few bubblewrap workers (bubblewrap.py). Each has a warm interpreter (zygote.py) that
forks one session per sandbox, into namespaces of its own. The session (session.py) forks a process
per command. The host talks with the session, which runs no code of the candidate. Only the channel
of ``call`` and ``check`` carries what a candidate wrote, and only disposable processes read it
(caller.py, judge.py). Errors are those of errors.py.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

from rl_code.environment.layers.store import LayerStore, MissingLayer
from rl_code.environment.sandbox.caller import (
    KILLED,
    Caller,
    CallResult,
    Checked,
    Program,
    ask_all,
    check_all,
)
from rl_code.environment.sandbox.config import SandboxConfig
from rl_code.environment.sandbox.connection import Connection
from rl_code.environment.sandbox.errors import (
    CandidateLost,
    SandboxFault,
    SandboxUnavailable,
    SnapshotError,
)
from rl_code.environment.sandbox.inside import supervise
from rl_code.environment.sandbox.judge_pool import Judges, Question
from rl_code.environment.sandbox.programs import Programs
from rl_code.environment.sandbox.snapshot import File, Snapshot, from_session, to_session
from rl_code.environment.sandbox.worker import Mode
from rl_code.environment.sandbox.workers import Sandboxes
from rl_code.types import World

# Names that users of sandboxes need are found here, wherever they are defined.
__all__ = [
    "CallResult",
    "Caller",
    "CandidateLost",
    "Completed",
    "File",
    "Mode",
    "Program",
    "Sandbox",
    "SandboxConfig",
    "SandboxFault",
    "SandboxPool",
    "SandboxUnavailable",
    "Snapshot",
    "SnapshotError",
]

READ_BYTES = 1 << 20
NOTHING: Mapping[str, Snapshot] = types.MappingProxyType({})
ATTEMPTS = 3
# Text that an agent reads when a limit of the sandbox as a whole ended its command.
_EXCEEDED = {
    "cpu": "killed: the CPU time of the command is used up",
    "memory": "killed: its processes together use too much memory",
    "processes": "killed: too many processes",
}


@dataclasses.dataclass(frozen=True)
class Completed:
    """Result of a command."""

    # Standard output and error as they came, cut in the middle.
    stdout: str
    # 128 + signal when killed by one, 124 when its time was up.
    exit_code: int
    # True if its wall-clock time was up.
    timed_out: bool
    # Bytes of output that were left out.
    cut_bytes: int
    # Wall-clock time.
    seconds: float
    # CPU time of all its processes.
    cpu_s: float = 0.0
    # The limit of the sandbox as a whole that it was killed for: "cpu", "memory" or "processes";
    # "" for none.
    exceeded: str = ""


class Closable(Protocol):
    """Object that can be closed, more than once."""

    def close(self) -> None:
        """Frees what it holds."""


class SandboxPool:
    """Opens sandboxes, many at once and from any thread.

    modes: ways to isolate, of which the first that works is taken; () stands for all that this
    process could use, the strongest first.
    Raises SandboxUnavailable, saying what to do, where none works.
    """

    def __init__(self, config: SandboxConfig, modes: Sequence[Mode] = ()):
        # The layer store of the worlds of tasks; None without one.
        self.layers = _store(config.layers) if config.layers else None
        if self.layers is not None:  # sandboxes are started in another folder
            config = dataclasses.replace(config, layers=str(self.layers.folder))
        self.config = config
        self._modes = modes
        self._lock = threading.Lock()
        self._keeping = threading.Lock()
        # Pools of sandboxes beside those of this pool, by their config.
        self._beside: dict[SandboxConfig, SandboxPool] = {}
        # Objects that tools keep for all episodes, each by a key of the tool's own.
        self._kept: dict[Hashable, Closable] = {}
        self._sandboxes = Sandboxes(config, modes)
        self._judges = Judges()

    def open(
        self,
        files: Snapshot,
        world: World | None = None,
        places: Mapping[str, Snapshot] = NOTHING,
    ) -> Sandbox:
        """A sandbox whose workspace holds ``files`` (relative path -> text or File), over the
        layers of ``world``.

        places: further folders by their absolute path, with the files that are laid over what the
        layers have there. They need a world with a layer at "/".

        Raises:
          ValueError: a path that is absolute or leads out, or files that do not fit the workspace.
          SandboxFault: no sandbox could be started, or a layer is missing or cannot be mounted.
        """
        for path in (*files, *(path for entries in places.values() for path in entries)):
            if not path or path.startswith("/") or "\0" in path or ".." in path.split("/"):
                raise ValueError(f"the path {path!r} does not stay inside the workspace")
        request = None if world is None else self._request(world, [*places])
        for attempt in range(ATTEMPTS):
            connection = Connection(self._sandboxes, self._sandboxes.take())
            try:
                if request:
                    _mount(connection, request)
                if files or not request:
                    entries = {"files": to_session(files)}
                    connection.ask(
                        {"op": "restore", "at": "", **entries}
                        if request
                        else {"op": "write", **entries}
                    )
                for place, laid in places.items():
                    connection.ask({"op": "restore", "at": place, "files": to_session(laid)})
                return Sandbox(connection, self._judges, world, self._sandboxes.frame_bytes)
            except SandboxFault as fault:
                connection.close()
                if attempt == ATTEMPTS - 1:
                    self._blame(files, world, places, fault)
            except (OSError, ValueError) as error:
                connection.close()
                raise ValueError(
                    f"{len(files)} files do not go into a workspace: {error}"
                ) from error
        raise AssertionError("unreachable")

    def _blame(
        self,
        files: Snapshot,
        world: World | None,
        places: Mapping[str, Snapshot],
        fault: SandboxFault,
    ) -> None:
        """Raises ValueError where only a sandbox with these files cannot be opened, else the fault.

        The files may be a candidate's: what they break must not count as a fault of the host.
        """
        if not files:
            raise fault
        self.open({}, world, places).close()  # raises SandboxFault where the host is to blame
        raise ValueError(f"{len(files)} files do not go into a workspace: {fault}") from fault

    def fork(self, sandbox: Sandbox) -> Sandbox:
        """Another sandbox with the same workspace: the same layers, and over them the files as they
        stand. /tmp and processes are not copied.

        Raises SnapshotError for files that cannot be copied, and what ``open`` raises.
        """
        return self.open(sandbox.snapshot(), sandbox.world)

    def _request(self, world: World, folders: list[str]) -> dict[str, Any]:
        """Request that tells a session about a world. Raises SandboxFault for a missing layer."""
        if self.layers is None:
            raise SandboxFault("a task has layers, but sandbox.layers names no layer store")
        try:
            layers = [[self.layers.tree(layer.digest), layer.at] for layer in world.layers]
        except MissingLayer as missing:
            raise SandboxFault(str(missing)) from missing
        return {
            "op": "world",
            "layers": layers,
            "workspace": world.workspace,
            "environment": dict(world.environment),
            "folders": folders,
        }

    def beside(self, **settings: Any) -> SandboxPool:
        """A pool with other settings, over the same layers; made once, and closed with this one.

        Raises ValueError for impossible settings, SandboxFault when this pool is closed, and
        SandboxUnavailable.
        """
        config = dataclasses.replace(self.config, **settings)
        with self._lock:
            if self._sandboxes.closed:
                raise SandboxFault("the pool is closed")
            if config not in self._beside:
                self._beside[config] = SandboxPool(config, self._modes)
            return self._beside[config]

    def keep[T: Closable](self, key: Hashable, make: Callable[[], T]) -> T:
        """Object that a tool keeps for all episodes under a key: made on first use, and closed with
        this pool.
        """
        with self._keeping:
            if key not in self._kept:
                self._kept[key] = make()
            return self._kept[key]

    def close(self) -> None:
        """Ends all sandboxes and everything in them."""
        with self._keeping:
            for kept in self._kept.values():
                kept.close()
            self._kept = {}
        with self._lock:
            beside = list(self._beside.values())
            self._sandboxes.close()
        for pool in beside:
            pool.close()
        self._judges.close()

    def __enter__(self) -> SandboxPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _store(folder: str) -> LayerStore:
    """The layer store in a folder. Raises SandboxUnavailable for one that sandboxes cannot use."""
    try:
        store = LayerStore(folder)
        owner = store.folder.stat().st_uid
    except OSError as error:
        raise SandboxUnavailable(f"sandbox.layers={folder!r} is no layer store: {error}") from error
    # In a sandbox the files of a layer must belong to the agent, or it could not change its copies.
    # Root shows them so, whoever owns them; others can show only what is their own.
    user = os.geteuid()
    if user not in (0, owner):
        raise SandboxUnavailable(
            f"sandbox.layers={folder!r} belongs to user {owner}, and sandboxes are started by "
            f"{user}: build a store of your own with python -m launch.layers"
        )
    return store


def _mount(connection: Connection, request: dict[str, Any]) -> None:
    """Mounts a world's layers. Raises SandboxFault: no code of a candidate has run yet."""
    try:
        connection.ask(request)
    except (OSError, ValueError) as error:
        raise SandboxFault(f"the layers of a world cannot be mounted: {error}") from error


class Sandbox:
    """One episode's workspace and processes. One thread at a time; close it when the episode ends.

    If the sandbox is lost after a command has run in it, everything that follows fails: commands
    end with code 137, calls are killed, files are not found, and a snapshot is empty. Only a loss
    before any command raises SandboxFault.
    """

    def __init__(
        self, connection: Connection, judges: Judges, world: World | None, frame_bytes: int
    ):
        self._connection = connection
        self._judges = judges
        self._frame_bytes = frame_bytes
        # The world whose layers lie below its files.
        self.world = world

    @property
    def cpu_s(self) -> float:
        """CPU seconds that the commands run so far have used."""
        return self._connection.cpu_s

    @property
    def lost(self) -> bool:
        """True if it is gone, for whatever reason."""
        return self._connection.loss is not None

    def run(self, argv: Sequence[str], *, stdin: str = "", timeout_s: float) -> Completed:
        """Runs a program in the workspace, then kills every process that it has left behind."""
        if not argv or any("\0" in word for word in argv):
            raise ValueError(f"{argv=} must name a program, without NUL characters")
        request = {"op": "run", "argv": list(argv), "stdin": stdin, "timeout": timeout_s}
        try:
            answer = self._connection.ask(request, timeout_s, of_candidate=True)
        except CandidateLost as lost:
            return Completed(f"{lost}\n", KILLED, False, 0, 0.0)
        code = supervise.TIMED_OUT if answer["timed_out"] else answer["status"]
        note = f"\n[{_EXCEEDED[answer['exceeded']]}]\n" if answer["exceeded"] else ""
        return Completed(
            answer["output"] + note,
            code,
            answer["timed_out"],
            answer["cut"],
            answer["seconds"],
            answer["cpu_s"],
            answer["exceeded"],
        )

    def start(
        self, argv: Sequence[str], *, stdin: str = "", channel: int, timeout_s: float
    ) -> Program:
        """Starts a program in the workspace that talks over a socket, its descriptor ``channel``,
        while it runs. It ends when it is closed.
        """
        if not argv or any("\0" in word for word in argv):
            raise ValueError(f"{argv=} must name a program, without NUL characters")
        return Program(self._connection, argv, channel, timeout_s, stdin)

    def call(
        self, path: str, entry_point: str, args: Sequence[tuple], *, timeout_s: float
    ) -> list[CallResult]:
        """``entry_point(*args)`` of the file at ``path`` for each tuple of arguments, in a fork of
        a warm interpreter.

        timeout_s: for all calls together. After a call that ended the process the others run in a
        new one. What the code prints is dropped. Raises ValueError for arguments that the wire does
        not carry.
        """
        return self.ask(path, entry_point, [Question(tuple(one)) for one in args], timeout_s)

    def ask(
        self, path: str, entry_point: str, questions: Sequence[Question], timeout_s: float
    ) -> list[CallResult]:
        """``call`` for questions, whose values are compared with what is expected of them."""
        return ask_all(
            self._connection,
            lambda left: self.caller(path, entry_point, left, timeout_s),
            questions,
            timeout_s,
        )

    def caller(
        self, path: str, entry_point: str, timeout_s: float, said_s: float | None = None
    ) -> Caller:
        """A process that has imported the file and answers one call after another, as ``Caller``
        describes.
        """
        return Caller(self._connection, self._judges, path, entry_point, timeout_s, said_s)

    def check(
        self,
        entry_point: str,
        statements: Sequence[str],
        open_caller: Callable[[float], Caller],
        *,
        timeout_s: float,
    ) -> list[Checked]:
        """Runs trusted tests in which ``entry_point`` is a proxy; how each of them ended.

        open_caller: opens a process of the candidate's, in another sandbox, that may live for so
        many seconds.
        """
        return check_all(self._connection, entry_point, statements, open_caller, timeout_s)

    def programs(self) -> Programs:
        """Programs that go on between calls. Until it is closed nothing else can be asked of this
        sandbox.
        """
        return Programs(self._connection, self._frame_bytes)

    def read_file(self, path: str, place: str = "") -> str:
        """A file's text. Raises FileNotFoundError, another OSError, or ValueError for what is no
        text or too long.

        place: the folder that it is in, of those that the sandbox was opened with; "" for the
        workspace.
        """
        request = {"op": "read", "path": path, "limit": READ_BYTES, "at": place}
        return self._files(request, path)

    def write_file(self, path: str, text: str) -> None:
        """Writes a file and its folders. Raises OSError: no space left, a path that leads out, a
        folder.
        """
        self._files({"op": "write", "files": {path: text}}, path)

    def restore(self, entries: Snapshot) -> None:
        """Lays entries of a snapshot over the workspace: each path is afterwards what its entry
        says. Raises OSError or ValueError where the file system refuses it.
        """
        try:
            self._connection.ask({"op": "restore", "at": "", "files": to_session(entries)})
        except CandidateLost as lost:
            raise OSError(str(lost)) from lost

    def list_files(self, below: str = "") -> list[str]:
        """Paths of the regular files of the workspace, sorted; links are not followed. The first
        ``files.MAX_LISTED`` when there are more.

        below: a folder, of which alone they are, or the path of a file.
        """
        return self._files({"op": "list", "below": below}) or []

    def snapshot(self) -> dict[str, str | File]:
        """Every file and link of the workspace, by path; empty when the sandbox is lost. In a
        world, the difference from its layers.

        Raises SnapshotError for files that cannot be handed in; it says which and why.
        """
        try:
            return from_session(self._files({"op": "snapshot"}) or {})
        except (OSError, ValueError) as error:
            raise SnapshotError(f"{error}") from error

    def close(self) -> None:
        """Ends every process of the sandbox and frees its memory. May be called twice."""
        self._connection.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _files(self, request: dict[str, Any], path: str = "") -> Any:
        """The answer to a request about files, or what the session raised; None where a question
        has no path.
        """
        if "\0" in path:
            raise ValueError(f"the path {path!r} contains a NUL character")
        try:
            return self._connection.ask(request)
        except CandidateLost as lost:
            if not path:
                return None
            raise FileNotFoundError(f"{path}: {lost}") from lost
