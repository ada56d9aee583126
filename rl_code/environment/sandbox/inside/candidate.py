"""The process that imports the candidate's file and answers calls of its functions.

It holds nothing but the arguments of the call that it answers: the next ones arrive after the
answer. Nothing that it says is trusted. Frames:

  to it    a number that nobody can guess, then the ``wire`` text of
           (None or a function's number, args, kwargs, whether changed arguments are to come back,
           whether functions in the value may be called later). Linked lists and trees are records
           of their values (nodes.py)
  from it  a letter, the same number, then the ``wire`` text of
             v  the value
             a  (value, args, kwargs), the arguments being changed
             e  (the exception's name, its builtin bases, its message, args, attributes)
           The letter is a capital one when something in the value has an ``__eq__`` that lies.

Runs inside the sandbox: standard library only.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import os
import socket
import sys
import types
from collections.abc import Callable
from typing import Any

from . import nodes, wire

MESSAGE_CHARACTERS = 500
FRAME_BYTES = 4 << 20
NUMBER_CHARACTERS = 16
VALUE_CHARACTERS = FRAME_BYTES - 1 - NUMBER_CHARACTERS
# An exception with more attributes than this sends none.
_ATTRIBUTES = 20

Answer = tuple[str, str]


def serve(channel: socket.socket, path: str, entry_point: str) -> None:
    """Imports the file at ``path`` and answers one call after another until the other side ends."""
    answer = _answerer(path, entry_point)
    while (call := wire.read_frame(channel, FRAME_BYTES)) is not None:
        letter, text = answer(call[NUMBER_CHARACTERS:])
        wire.write_frame(channel, letter + call[:NUMBER_CHARACTERS] + text)


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


def _answerer(path: str, entry_point: str) -> Callable[[str], Answer]:
    """A function from the text of a call to the letter and the text of its answer."""
    try:
        module = _load(path)
        function = functools.reduce(_member, entry_point.split("."), module)
    except BaseException as error:  # the file is not trusted and may raise anything, SystemExit too
        if isinstance(error, AttributeError) and error.name == entry_point.partition("()")[0]:
            failed = _failure("NameError", f"{path} defines no {entry_point}")
        else:
            failed = _raised(error)
        return lambda call: failed

    functions: list[Any] = []

    def answer(call: str) -> Answer:
        number, args, kwargs, back, callable_later = wire.loads(call)
        kept = functions if callable_later else None
        called = function if number is None else functions[number]
        try:
            if any(kind in call for kind in nodes.CLASSES):
                args, kwargs = _built(args, module), _built(kwargs, module)
            value = called(*args, **kwargs)
            try:
                letter, (text, lying) = "v", wire.write(value, kept)
                if back and wire.dumps((number, args, kwargs, back, callable_later)) != call:
                    letter, (text, lying) = "a", wire.write((value, args, kwargs), kept)
            except wire.WireError as error:
                message = f"{entry_point} returned what tests cannot compare: {error}"
                letter, text = _failure("TypeError", message)
                lying = error.lying
            if len(text) > VALUE_CHARACTERS:
                return _failure("TypeError", f"{entry_point} returned {len(text)} characters")
            return (letter.upper() if lying else letter), text
        except BaseException as error:  # as above
            return _raised(error)

    return answer


def _member(value: Any, name: str) -> Any:
    """A member by name; ``name()`` stands for what it gives when it is called."""
    member = getattr(value, name.removesuffix("()"))
    return member() if name.endswith("()") else member


def _built(value: Any, module: types.ModuleType) -> Any:
    """The value with nodes in place of the records that stand for them. Their class is that of the
    module where it defines one.
    """
    if type(value) is wire.Record:
        kind, fields = value.__dict__["__kind__"], wire.fields_of(value)
        if kind in nodes.CLASSES and list(fields) == [nodes.VALUES]:
            return nodes.build(kind, fields[nodes.VALUES], getattr(module, kind, None))
    if type(value) in (list, tuple):
        return type(value)(_built(item, module) for item in value)
    if type(value) is dict:
        return {key: _built(item, module) for key, item in value.items()}
    return value


def _failure(name: str, message: str) -> Answer:
    return "e", wire.dumps((name, [name], message, (message,), {}))


def _raised(error: BaseException) -> Answer:
    """An exception with as much of its arguments and attributes as can be sent."""
    name, message = describe(error)
    bases = [
        base.__name__ for base in type(error).__mro__ if vars(builtins).get(base.__name__) is base
    ]
    short = wire.dumps((name, bases, message, (message,), {}))
    try:
        attributes = dict(vars(error)) if len(vars(error)) <= _ATTRIBUTES else {}
        text = wire.dumps((name, bases, message, tuple(error.args), attributes))
    except BaseException:  # the exception's class is the candidate's
        text = short
    if len(text) > VALUE_CHARACTERS:
        text = short
    return "e", text


def _load(path: str) -> types.ModuleType:
    """The module in the file at ``path``, under the name that an import from the workspace's root
    would give it, or one from the folder src if that is no package.
    """
    # as bytes, since a file may begin with a mark or say how it is encoded
    with open(path, "rb") as file:
        source = file.read()
    below = path
    if path.startswith("src/") and not os.path.exists("src/__init__.py"):
        below = path.removeprefix("src/")
        sys.path.insert(0, os.path.abspath("src"))
    name = below.removesuffix(".py").replace("/", ".")
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
