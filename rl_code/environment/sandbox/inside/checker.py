"""The process that runs tests written as code, with a proxy in place of the candidate's function.

It runs in a sandbox of its own and talks with the candidate's process over a channel that the host
gives it. On the control channel it says JSON objects, a frame each:

  {"need": true}                a process of the candidate is needed; answered with its channel
  {"gone": ""}                  that process has ended or forged a frame; answered with the reason
  {"done": error, "flags": []}  how a statement ended, "" when it passed

An exception of the candidate's is raised where the test called it, and a test can lose it by
accident: ``all(map(f, xs))`` ends quietly at a StopIteration. So every exception is also recorded.
A statement that completes although a call raised passes only if it asks for such an exception by
``except``, ``assertRaises``, ``raises`` or ``suppress``; where it asks for any exception at all,
the statement passes and is flagged. The end of a process is never an exception that a test asks
for.

Runs inside the sandbox: standard library only.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import json
import socket
import sys
import types
from typing import Any

from . import calls, wire
from .candidate import MESSAGE_CHARACTERS, describe

CONTROL_BYTES = 1 << 16
_EXPECTS = ("assertRaises", "assertRaisesRegex", "raises", "suppress")
_ANY = {"Exception", "BaseException"}


class CandidateError(Exception):
    """Raised by the proxy for what no builtin exception names, and for the end of the process."""


def check(control: socket.socket, entry_point: str, statements: list[str]) -> None:
    """Runs each statement with ``entry_point`` bound to a proxy and reports how it ended."""
    line = _Line(control)
    for statement in statements:
        line.begin(statement)
        failure = _run(statement, _Proxy(line, entry_point), line)
        text = failure.encode(errors="replace").decode()
        line.say({"done": text, "flags": sorted(line.flags)})


def _run(statement: str, proxy: _Proxy, line: _Line) -> str:
    """Reason why the statement fails; "" when it passes."""
    try:
        code = compile(statement, "<test>", "exec")
        # A module of its own: a test that defines a dataclass needs one that can be found.
        module = sys.modules["checker"] = types.ModuleType("checker")
        # a method has the name that stands last: that of Solution().f is f
        setattr(module, proxy.__name__.rpartition(".")[2], proxy)
        exec(code, module.__dict__)
    except BaseException as error:  # a test that exits or interrupts has failed, too
        failure = ": ".join(filter(None, describe(error)))
        if line.last and isinstance(error, AssertionError):
            failure += f" ({line.last})"
        return failure
    return line.swallowed()


class _Line:
    """Line to the candidate's process, with the messages that came over it during one statement."""

    def __init__(self, control: socket.socket):
        self._control = control
        self._channel: socket.socket | None = None
        # Counts processes, since a function lives only as long as the process that returned it.
        self.process = 0

    def begin(self, statement: str) -> None:
        """Forgets what was recorded."""
        self._statement = statement
        self._asked: set[str] | None = None
        self._raised: list[Exception] = []
        self.flags: set[str] = set()
        # Result of the last call, in words.
        self.last = ""

    def say(self, message: dict[str, Any]) -> None:
        """Tells the host something."""
        wire.write_frame(self._control, json.dumps(message))

    def ask(self, text: str, name: str) -> tuple[Any, ...]:
        """The answer to a call: (value,), or (value, args, kwargs) when the arguments changed.

        Raises what the candidate raised, or CandidateError when there is no answer.
        """
        if self._channel is None:
            self.say({"need": True})
            _, (descriptor, *_), _, _ = socket.recv_fds(self._control, 1, 1)
            self._channel = socket.socket(fileno=descriptor)
            self.process += 1
        try:
            letter, answer, lying = calls.exchange(self._channel, text)
            value = wire.loads(answer, lambda number, called: _Proxy(self, called, number))
        except calls.Ended:
            raise self._gone(name) from None
        except (calls.Forged, wire.WireError) as error:
            self.flags.add("forged_result")
            raise self._gone(name, f"the result cannot be read: {error}") from None
        if lying:
            self.flags.add("lying_value")
        match letter, value:
            case "v", _:
                self.last = f"{name} returned {_short(value)}"
                return (value,)
            case "a", (returned, tuple(), dict()):
                self.last = f"{name} returned {_short(returned)}"
                return value
            case "e", (str(kind), list(bases), str(message), tuple(args), dict(attributes)):
                raise self._record(_exception(kind, bases, message, args, attributes, self.asked()))
        self.flags.add("forged_result")
        raise self._gone(name, "the result cannot be read: it is no answer")

    def _gone(self, name: str, reason: str = "") -> Exception:
        """Gives the process up; the exception for the call that it has not answered."""
        assert self._channel is not None
        self._channel.close()
        self._channel = None
        self.say({"gone": reason})
        told = wire.read_frame(self._control, CONTROL_BYTES) or "the candidate's process is gone"
        self.last = f"{name}: {told}"
        return self._record(CandidateError(reason or told))

    def _record(self, error: Exception) -> Exception:
        if not self.last or not isinstance(error, CandidateError):
            self.last = f"a call raised {type(error).__name__}"
        self._raised.append(error)
        return error

    def asked(self) -> set[str]:
        """Names of the exceptions that the statement asks for."""
        if self._asked is None:
            self._asked = set()
            for node in ast.walk(ast.parse(self._statement)):
                if isinstance(node, ast.ExceptHandler):
                    self._asked |= _names(node.type) if node.type else {"BaseException"}
                elif isinstance(node, ast.Call) and _names(node.func) & set(_EXPECTS):
                    self._asked |= set().union(*map(_names, node.args))
        return self._asked

    def swallowed(self) -> str:
        """Reason why a statement that has completed fails all the same; "" when it does not."""
        for error in self._raised:
            kinds = {kind.__name__ for kind in type(error).__mro__} & self.asked()
            if isinstance(error, CandidateError) or not kinds:
                self.flags.add("swallowed_exception")
                name, message = describe(error)
                return f"{name} was raised and lost by the test: {message}"
            if kinds <= _ANY:
                self.flags.add("any_exception")
        return ""


class _Proxy:
    """Stands for a function of the candidate's: sends the arguments out, returns or raises what
    comes back, and carries changes of the arguments over.
    """

    def __init__(self, line: _Line, name: str, number: int | None = None):
        self._line = line
        self._number = number
        self._process = line.process
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._number is not None and self._process != self._line.process:
            raise CandidateError(f"the process that returned {self.__name__} is gone")
        back = any(map(_changeable, (*args, *kwargs.values())))
        try:
            text = calls.call_text(self._number, args, kwargs, back=back, functions=True)
        except wire.WireError as error:
            raise TypeError(
                f"{self.__name__} is called with an argument that cannot be sent to it: {error}"
            ) from error
        value, *changed = self._line.ask(text, self.__name__)
        if changed:
            _change(args, changed[0])
            _change(kwargs, changed[1])
        return value


def _changeable(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_changeable, value))
    return isinstance(value, list | dict | set) or dataclasses.is_dataclass(value)


def _change(old: Any, new: Any) -> Any:
    """Makes ``old`` equal to ``new`` in its place, if it can be changed; returns what is there."""
    if isinstance(old, list) and type(new) is list:
        kept = [_change(a, b) for a, b in zip(old, new, strict=False)]
        old[:] = kept + new[len(kept) :]
    elif isinstance(old, dict) and type(new) is dict:
        pairs = {key: _change(old[key], b) if key in old else b for key, b in new.items()}
        old.clear()
        old.update(pairs)
    elif isinstance(old, set) and type(new) is set:
        old.clear()
        old.update(new)
    elif isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
        for a, b in zip(old, new, strict=True):
            _change(a, b)
    elif dataclasses.is_dataclass(old) and type(new) is wire.Record:
        for name, item in wire.fields_of(new).items():
            object.__setattr__(old, name, _change(getattr(old, name, None), item))
    else:
        return new
    return old


def _names(node: ast.expr) -> set[str]:
    """The last names of an expression of names, attributes and tuples of them."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return {name}
        case ast.Tuple(elts=elements):
            return set().union(*map(_names, elements))
    return set()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _exception(
    name: str,
    bases: list[Any],
    message: str,
    args: tuple[Any, ...],
    attributes: dict[Any, Any],
    asked: set[str],
) -> Exception:
    """The exception that the candidate says it raised, as its nearest builtin class or one made
    below that; CandidateError for what is no Exception, and for what cannot be made.

    A StopIteration becomes a RuntimeError, as in a generator (PEP 479), unless the test asks for
    it.
    """
    message = message[:MESSAGE_CHARACTERS]
    found = (getattr(builtins, base, None) for base in bases if isinstance(base, str))
    base = next((b for b in found if isinstance(b, type) and issubclass(b, BaseException)), None)
    if base is None or not issubclass(base, Exception):
        return CandidateError(": ".join(filter(None, (name, message))))
    if issubclass(base, StopIteration | StopAsyncIteration) and not asked & {name, base.__name__}:
        return RuntimeError(f"the candidate raised {name}")
    try:
        if base.__name__ == name:
            error = base(*args)
        else:
            error = type(name, (base,), {"__str__": lambda self: message})(*args)
        named = {key: value for key, value in attributes.items() if str(key).isidentifier()}
        error.__dict__.update({k: v for k, v in named.items() if not k.startswith("__")})
        return error
    except (TypeError, ValueError, UnicodeError):
        return CandidateError(": ".join(filter(None, (name, message))))
