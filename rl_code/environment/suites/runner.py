"""Runs pytest in a sandbox and reads what its plugin says, without trusting it.

The plugin (plugin.py) shares its process with the candidate, so everything that arrives here may
be forged. What is made sure of: each line carries a number that the host sent after the line
before, so nothing that was written in advance counts; every id was asked for and comes once, in a
test run that goes on; and what comes is read by splitting lines of limited length, not by decoding
values. Forgery from inside, at the right moment, is what canaries are for (canaries.py).
"""

from __future__ import annotations

import dataclasses
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rl_code.environment.sandbox.caller import Program
from rl_code.environment.sandbox.connection import GRACE_S
from rl_code.environment.sandbox.pool import Sandbox

PLUGIN = Path(__file__).with_name("plugin.py")
VARIABLE = "RL_CODE_SUITE"
# Descriptors that programs do not use by themselves.
_DESCRIPTORS = range(100, 200)
# Bytes of one line, and of all lines.
_LINE_BYTES = 4 << 20
_ALL_BYTES = 16 << 20
_OPTIONS = (
    *("-p", "no:cacheprovider", "--continue-on-collection-errors", "--tb=short", "-q"),
    # whatever the suite's settings say, a canary that fails is not the end
    *("--color=no", "-rN", "--maxfail=0"),
)
_NOT_RUN = "the test was not run"
# Characters that are quoted of what a program printed.
_SAID = 300


@dataclasses.dataclass(frozen=True)
class Report:
    """Result of a run of pytest."""

    # Id -> "" if it passed, or why not, for every id that was asked for.
    errors: dict[str, str]
    # True if the plugin was loaded. If not, pytest did not start, and no code of the candidate can
    # have run, unless the world itself imports it.
    started: bool
    # "forged_result": what came is nothing that the plugin says. "timeout", "killed", "exited": the
    # process ended before the last test.
    flags: frozenset[str]
    # The beginning and the end of what the program printed.
    printed: str
    # Files that could not be collected.
    broken: frozenset[str] = frozenset()
    # Id of a test that ran -> its subtests that were skipped.
    skipped: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


class _Forged(Exception):
    """Raised for a message that the plugin never sends."""


def run_suite(
    sandbox: Sandbox, command: Sequence[str], ids: Sequence[str], timeout_s: float
) -> Report:
    """Runs the tests of these ids. Raises SandboxFault.

    command: what starts pytest in the workspace.
    """
    name = f"report_{secrets.token_hex(6)}"
    descriptor = secrets.choice(_DESCRIPTORS)
    folder = f"/tmp/{secrets.token_hex(6)}"
    arguments = [*command, "-p", name, *_OPTIONS, *_places(ids)]
    with sandbox.start(
        ["sh", "-c", _script(folder, name, descriptor, command), "sh", *arguments],
        stdin=PLUGIN.read_text(),
        channel=descriptor,
        timeout_s=timeout_s,
    ) as program:
        return _listen(program, ids, timeout_s)


def _script(folder: str, name: str, descriptor: int, command: Sequence[str]) -> str:
    """A program of the shell that puts the plugin in its place and becomes its arguments."""
    first = '"$PWD"' if "-m" in " ".join(command).split() else ""
    settings = [
        f"{VARIABLE}={descriptor},{first}",
        f'PYTHONPATH="{folder}${{PYTHONPATH:+:$PYTHONPATH}}"',
        "PYTHONSAFEPATH=1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1",
        "PYTHONHASHSEED=0",
    ]
    place = f"mkdir -p {folder} && cat > {folder}/{name}.py"
    return f'{place} && unset PYTEST_ADDOPTS PYTEST_PLUGINS && exec env {" ".join(settings)} "$@"'


def _places(ids: Sequence[str]) -> list[str]:
    """Files that pytest is told to collect: those of the ids."""
    return list(dict.fromkeys(one.partition("::")[0] for one in ids))


def _listen(program: Program, ids: Sequence[str], timeout_s: float) -> Report:
    """Reads what the plugin says until it has said everything or the program has ended."""
    conversation = _Conversation(program.channel, ids, time.monotonic() + timeout_s + GRACE_S)
    flags = set()
    try:
        conversation.hold()
    except _Forged:
        flags.add("forged_result")
    except OSError:  # the program has ended, or does not answer
        pass
    text, cause = program.ending(timeout_s)
    if not conversation.found:  # such as options that pytest does not know without its plugins
        text += f"; it says {' '.join(program.printed.split())[-_SAID:]!r}"
    if not conversation.ended and "forged_result" not in flags:
        flags.add(cause)
    errors = {}
    for one in ids:
        error = conversation.errors.get(one)
        if "forged_result" in flags:
            error = "the result cannot be read: it is not what the test run says"
        elif error is None:
            broken = conversation.broken.get(one.partition("::")[0], "")
            error = broken or (_NOT_RUN if conversation.ended else f"{_NOT_RUN}: {text}")
        errors[one] = error
    return Report(
        errors,
        conversation.started,
        frozenset(flags),
        program.printed,
        frozenset(conversation.broken),
        conversation.skipped,
    )


class _Conversation:
    """Messages of the plugin so far, and the answers to them."""

    def __init__(self, channel: socket.socket, ids: Sequence[str], deadline: float):
        self._channel = channel
        self._deadline = deadline
        self._ids = ids
        self._rest = b""
        self._bytes = 0
        self._number = ""
        # Ids that pytest has found and not run yet.
        self._waiting: set[str] = set()
        # found: tests have been collected. started: the plugin was loaded.
        self.found = False
        self.started = False
        self.ended = False
        self.errors: dict[str, str] = {}
        # File -> why it cannot be collected.
        self.broken: dict[str, str] = {}
        # Id -> subtests that were skipped.
        self.skipped: dict[str, tuple[str, ...]] = {}

    def hold(self) -> None:
        """Reads and answers until "end". Raises _Forged, and OSError when nothing more comes."""
        self._answer()
        while not self.ended:
            number, word, *fields = self._line()
            if number != self._number:
                raise _Forged("a line without the number")
            match word, fields:
                case "ready", [] if not self.started:
                    self.started = True
                    # sorted, since their order would tell canaries from what they are copies of
                    self._answer(*sorted(self._ids))
                    continue
                case "broken", [file, why] if self.started:
                    self.broken[file.partition("::")[0]] = f"the file cannot be collected: {why}"
                case "found", found if self.started and not self.found:
                    self._find(found)
                case "ran", [one, outcome, *skipped] if one in self._waiting:
                    self._waiting.remove(one)
                    self.errors[one] = "" if outcome == "passed" else outcome or "failed"
                    if skipped:
                        self.skipped[one] = tuple(skipped)
                case "end", [] if self.started:
                    self.ended = True
                case _:
                    raise _Forged(f"unexpected {word}")
            self._answer()

    def _find(self, found: list[str]) -> None:
        found_once = set(found)
        if len(found_once) < len(found) or not found_once <= set(self._ids):
            raise _Forged("ids that were not asked for, or twice")
        self._waiting = found_once
        self.found = True

    def _answer(self, *fields: str) -> None:
        self._number = secrets.token_hex(8)
        words = [field.encode("unicode_escape").decode() for field in fields]
        self._channel.settimeout(max(self._deadline - time.monotonic(), 0.01))
        try:
            self._channel.sendall(("\t".join([self._number, *words]) + "\n").encode())
        except OSError:
            if not self.ended:
                raise

    def _line(self) -> list[str]:
        """The fields of the next line; at least two."""
        parts = [self._rest]
        size = len(self._rest)
        while b"\n" not in parts[-1]:
            self._channel.settimeout(max(self._deadline - time.monotonic(), 0.01))
            part = self._channel.recv(1 << 16)
            if not part:
                raise OSError("the program has ended")
            parts.append(part)
            size += len(part)
            self._bytes += len(part)
            if size > _LINE_BYTES or self._bytes > _ALL_BYTES:
                raise _Forged("too much")
        line, _, self._rest = b"".join(parts).partition(b"\n")
        try:
            fields = [
                field.encode().decode("unicode_escape")
                for field in line.decode("ascii").split("\t")
            ]
        except UnicodeError as error:
            raise _Forged("not what the plugin writes") from error
        if len(fields) < 2:
            raise _Forged("too short")
        return fields
