"""Packages that few tests use, imported when one first does.

Every worker imports all test files, and such a package may take a second.
"""

from __future__ import annotations

import importlib
from typing import Any


class Late:
    """Stands for a module: reading an attribute of it imports the module."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        # pytest looks at all that a file holds
        if attribute.startswith(("__", "_pytest", "_mock")):
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
