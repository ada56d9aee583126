"""Stands in for libraries that take seconds to import, in a process that only prints help.

The text of ``--help`` is made of docstrings, flags and the fields of dataclasses. The modules that
define these import jax and others, of which nothing runs.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

LIBRARIES = frozenset(
    "alembic array_record flax grain httpx jax jaxlib jaxtyping lsprotocol matplotlib ml_dtypes "
    "numpy openai optax orbax pygls qwix ray safetensors scipy sqlalchemy starlette tensorboardX "
    "tensorstore tokenizers transformers tree_sitter uvicorn".split()
)


def _attribute(name: str) -> Any:
    """A stand-in for what a library has. Python's own names, such as ``__path__``, are not among
    it.
    """
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(name)
    return StandIn


class _OfStandIns(type):
    """Any attribute, index, operator and call of a stand-in gives a stand-in."""

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict, **settings: Any) -> Any:
        # settings are for the library's own class
        return super().__new__(cls, name, bases, body)

    def __getattr__(cls, name: str) -> Any:
        return _attribute(name)

    def __call__(cls, *arguments: Any, **settings: Any) -> Any:
        if cls is not StandIn:  # a class of ours below one of theirs
            return super().__call__(*arguments, **settings)
        # as a decorator it leaves classes alone, whose fields the help tells
        if len(arguments) == 1 and isinstance(arguments[0], type) and arguments[0] is not StandIn:
            return arguments[0]
        return StandIn

    def __getitem__(cls, key: Any) -> Any:
        return StandIn

    def __iter__(cls) -> Any:
        return iter(())

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __truediv__ = __or__
    __rsub__ = __rtruediv__ = __pow__ = __neg__ = lambda cls, *other: StandIn


class StandIn(metaclass=_OfStandIns):
    """In the place of anything that a library has."""


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of LIBRARIES without loading them: each has a stand-in for everything."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] not in LIBRARIES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["__getattr__"] = _attribute


def leave_unloaded() -> None:
    """Lets the rest of this process do without the libraries."""
    sys.meta_path.insert(0, Finder())
