"""Numbers of a run per step: one JSON object a line in ``metrics.jsonl``.

    {"step": 12, "train/loss": 0.31, ...}

Where else the numbers go is in ``metric_writers``, what they are in ``step_metrics``.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl in order, a torn last line left out; [] where there is no file.

    Raises ValueError naming file and line for any other damaged line.
    """
    path = Path(workdir) / METRICS_FILE
    if not path.exists():
        return []
    # what follows the last newline is torn
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            rows.append({name: _NON_FINITE.get(value, value) for name, value in row.items()})
        except (ValueError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number}: not a row of metrics: {line[:80]!r}"
            ) from error
    return rows


class CompilationCounter:
    """Counts XLA compilations while it is open: after warm-up there must be none. A context
    manager. In a process that has not loaded jax it counts nothing.
    """

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> CompilationCounter:
        self._jax = sys.modules.get("jax")
        if self._jax:
            self._jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        if self._jax:
            self._jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration: float, **_: Any) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def json_line(value: Any) -> str:
    """Strict JSON: what a model wrote may hold NaN or infinities, which become words."""
    try:
        return (
            json.dumps(
                value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=repr
            )
            + "\n"
        )
    except ValueError:
        return json_line(json.loads(json.dumps(value, default=repr), parse_constant=str))


def as_number(name: str, value: Any) -> int | float:
    """The plain number of a metric; ValueError unless it is one number, bool or array of one."""
    try:
        number = value.item() if hasattr(value, "item") else value
        return int(number) if isinstance(number, bool | int) else float(number)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metric {name} = {value!r}: expected one number") from error
