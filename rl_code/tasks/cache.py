"""Cache of values computed while tasks are loaded, kept in JSON files of the workdir."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_code.host.files import PARTIAL, replace

# Cases whose expected values references gave (``differential``).
DIFFERENTIAL = "differential.json"
# Which tests of suites pass before the work, and what solutions change (``suites_by_run``).
SUITES = "suites.json"
# Why tasks can be forged (``guards``).
GUARDS = "guards.json"
# A fork of a run takes all of them along.
FILES = (DIFFERENTIAL, SUITES, GUARDS)


class Cache:
    """Values by key, in a JSON file that is made or extended; without a file, in memory alone.

    Several processes of a run may extend one file: each replaces it in one step, and what another
    one kept meanwhile is computed again by whoever needs it.
    """

    def __init__(self, path: Path | None):
        """Raises ValueError for a file that holds something else."""
        self._path = path
        self._known: dict[str, Any] = {}
        if path is None or not path.exists():
            return
        try:
            self._known = json.loads(path.read_text())
            if not isinstance(self._known, dict):
                raise ValueError("it holds no object")
        except ValueError as error:
            raise ValueError(f"{path}: not a cache of tasks ({error}); delete it") from error

    def get(self, key: str) -> Any:
        """Value that is kept under a key; None if there is none."""
        return self._known.get(key)

    def put(self, values: Mapping[str, Any]) -> None:
        """Keeps values that JSON can write."""
        self._known |= values
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # a name of its own, so that processes do not write into each other's file
        aside = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}{PARTIAL}")
        replace(self._path, json.dumps(self._known, sort_keys=True).encode(), aside)
