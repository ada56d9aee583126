"""What runs in the forked child of a session: the candidate's function, or the tests that call it
through a proxy.

The two never share a process, nor a sandbox. Frames on the channel are values of ``wire``:
  to a candidate    (args, kwargs)
  from a candidate  ("value", v) or ("error", name of the exception, message)
  from a checker    ("call", args, kwargs), answered with a candidate's frame;
                    ("done", error or "") after each statement

Runs inside the sandbox: standard library only.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import socket
import sys
import types
from collections.abc import Callable
from typing import Any

from . import wire

MESSAGE_CHARACTERS = 500
FRAME_BYTES = 4 << 20


class CandidateError(Exception):
    """Raised by the proxy for what no builtin exception names."""


def serve(
    channel: socket.socket, path: str, entry_point: str, calls: list[str], more: bool
) -> None:
    """Imports the file at ``path`` and answers ``calls``, then, if ``more``, those that come until
    the end.
    """
    answer = _answerer(path, entry_point)
    for call in calls:
        wire.write_frame(channel, answer(call))
    while more and (call := wire.read_frame(channel, FRAME_BYTES)) is not None:
        wire.write_frame(channel, answer(call))


def check(channel: socket.socket, entry_point: str, statements: list[str]) -> None:
    """Runs each statement with ``entry_point`` bound to a proxy and reports how it ended."""
    for statement in statements:
        proxy = _Proxy(channel, entry_point)
        try:
            exec(compile(statement, "<test>", "exec"), {"__name__": "checker", entry_point: proxy})
        except BaseException as error:  # a test that exits or interrupts has failed, too
            failure = ": ".join(filter(None, describe(error)))
            if proxy.last and isinstance(error, AssertionError):
                failure += f" ({proxy.last})"
        else:
            failure = ""
        wire.write_frame(channel, wire.dumps(("done", failure)))


def describe(error: BaseException) -> tuple[str, str]:
    """The name and the short message of an exception whose class need not be honest."""
    try:
        name = type(error).__name__
        message = str(error)
        if isinstance(error, SyntaxError):
            message = f"{error.msg} (line {error.lineno}: {(error.text or '').strip()})"
    except BaseException as inner:
        return type(error).__name__, f"its message could not be read: {type(inner).__name__}"
    return str(name)[:MESSAGE_CHARACTERS], str(message)[:MESSAGE_CHARACTERS]


def _answerer(path: str, entry_point: str) -> Callable[[str], str]:
    """A function from the text of a call to the text of its answer."""
    try:
        function = functools.reduce(getattr, entry_point.split("."), _load(path))
    except BaseException as error:  # the file is not trusted and may raise anything, SystemExit too
        if isinstance(error, AttributeError) and error.name == entry_point:
            failed = wire.dumps(("error", "NameError", f"{path} defines no {entry_point}"))
        else:
            failed = wire.dumps(("error", *describe(error)))
        return lambda call: failed

    def answer(call: str) -> str:
        args, kwargs = wire.loads(call)
        try:
            value = function(*args, **kwargs)
            try:
                return wire.dumps(("value", value))
            except wire.WireError as error:
                return wire.dumps(
                    (
                        "error",
                        "TypeError",
                        f"{entry_point} returned what tests cannot compare: {error}",
                    )
                )
        except BaseException as error:  # as above
            return wire.dumps(("error", *describe(error)))

    return answer


def _load(path: str) -> types.ModuleType:
    """The module in the file at ``path``, under the name that an import from the workspace's root
    would give it.
    """
    with open(path, encoding="utf-8") as file:
        source = file.read()
    name = path.removesuffix(".py").replace("/", ".")
    if not all(part.isidentifier() for part in name.split(".")):
        name = "candidate"
    package, _, leaf = name.rpartition(".")
    if package:
        importlib.import_module(package)
    if leaf == "__init__":
        name = package
    module = types.ModuleType(name)
    module.__file__, module.__package__ = path, package
    code = compile(source, path, "exec", dont_inherit=True)
    sys.modules[name] = module
    exec(code, module.__dict__)
    return module


class _Proxy:
    """Stands for the candidate's function in a test: sends the arguments out, returns or raises
    what comes back.
    """

    def __init__(self, channel: socket.socket, name: str):
        self._channel = channel
        self.__name__ = name
        self.last = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            text = wire.dumps(("call", args, kwargs))
        except wire.WireError as error:
            raise TypeError(
                f"{self.__name__} is called with an argument that cannot be sent to it: {error}"
            ) from error
        wire.write_frame(self._channel, text)
        reply = wire.read_frame(self._channel, 2 * FRAME_BYTES)
        if reply is None:
            raise CandidateError("the candidate's process is gone")
        match wire.loads(reply):
            case ("value", value):
                self.last = f"{self.__name__} returned {_short(value)}"
                return value
            case ("error", str(name), str(message)):
                self.last = f"{self.__name__} raised {name}"
                raise _exception(name, message)
        raise CandidateError("the candidate's process answered nothing that can be read")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _exception(name: str, message: str) -> Exception:
    """The builtin exception of that name, so that tests which expect one see it; else
    CandidateError.
    """
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(message)
        except TypeError:
            pass
    return CandidateError(": ".join(filter(None, (name, message))))
