"""Tables of completions that TRL's trainers write with ``log_completions=True``.

``<output_dir>/completions/completions_<step>.parquet`` has a row for each completion of the newest
batch: ``step``, ``prompt`` and ``completion`` (texts, or lists of messages), a column for each
reward function, columns that the reward functions logged, and ``advantage``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rl_code.foreign.dump import Branch, DumpedGroup, Episode, Found
from rl_code.foreign.messages import answer_spans, messages_of, prompt_spans
from rl_code.foreign.reading import (
    Words,
    digest,
    files_of,
    number_of,
    parquet_rows,
    whole_number,
    wrong,
)

_KNOWN = ("step", "prompt", "completion", "advantage")


@dataclasses.dataclass(frozen=True)
class Trl:
    """Reader of such tables."""

    # Columns that are rewards. A table with one column of numbers needs no name: that is it.
    rewards: tuple[str, ...] = ()
    # Weight of each reward in the trainer (``reward_weights``); 1 for those that are not named.
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)

    lacks: ClassVar[str] = (
        "token ids, log-probabilities of sampler and trainer, weights of rewards, versions of the "
        "weights, completions of the batches between two tables"
    )

    def find(self, paths: Sequence[Path]) -> Found:
        """Step -> its table. Raises DumpError."""
        what = "completions_<step>.parquet of TRL's log_completions"
        found: dict[int, Path] = {}
        for path in files_of(paths, ["completions_*.parquet"], what):
            number = path.stem.rpartition("_")[2]
            if not number.isdecimal():
                wrong(path, "", "a file named completions_<step>.parquet", Words(path.name))
            step = int(number)
            if step in found:
                wrong(path, "", f"one table of step {step}", Words(f"{found[step]} as well"))
            found[step] = path
        return Found(found)

    def read(self, step: int, place: Path) -> Sequence[DumpedGroup]:
        """The groups of a step, in the order of their first rows. Raises DumpError."""
        groups: dict[str, tuple[Any, list[Episode]]] = {}
        rows = list(parquet_rows(place))
        columns = self._columns(rows) if rows else ()
        for line, row in rows:
            for field in ("step", "prompt", "completion"):
                if row.get(field) is None:
                    wrong(line, field, "a value", Words(f"columns {', '.join(row)}"))
            if whole_number(line, "step", row["step"]) != step:
                wrong(line, "step", f"{step}, as the file's name says", row["step"])
            prompt = row["prompt"]
            if not isinstance(prompt, str):
                prompt = messages_of(line, "prompt", prompt)
            episode = self._episode(line, row, columns)
            groups.setdefault(digest(prompt), (prompt, []))[1].append(episode)
        if not groups:
            wrong(place, "", "a row for each completion", Words("an empty table"))
        return [
            DumpedGroup(
                f"trl-{key}",
                ({"role": "user", "content": prompt},) if isinstance(prompt, str) else (*prompt,),
                {},
                tuple(episodes),
            )
            for key, (prompt, episodes) in groups.items()
        ]

    def _episode(self, line: object, row: Mapping[str, Any], columns: Sequence[str]) -> Episode:
        values = {
            name: math.nan if row[name] is None else number_of(line, name, row[name])
            for name in columns
        }
        # a reward function that returned None does not count
        parts = {
            name: self.weights.get(name, 1.0) * value
            for name, value in values.items()
            if not math.isnan(value)
        }
        notes = {
            name: value
            for name, value in row.items()
            if name not in columns and name not in _KNOWN[:3]
        }
        spans = prompt_spans(line, "prompt", row["prompt"])
        spans += answer_spans(line, "completion", row["completion"])
        return Episode(
            (Branch(tuple(spans)),),
            sum(parts.values()) if parts else math.nan,
            parts,
            notes=notes,
            place=str(line),
        )

    def _columns(self, rows: Sequence[tuple[object, Mapping[str, Any]]]) -> Sequence[str]:
        """The columns that are rewards. Raises DumpError where that cannot be told."""
        line, row = rows[0]
        if self.rewards:
            for name in self.rewards:
                if name not in row:
                    wrong(line, name, "a column of rewards", Words(f"columns {', '.join(row)}"))
            return self.rewards
        others = [
            name
            for name in row
            if name not in _KNOWN
            and all(value is None or type(value) in (int, float) for value in _values(rows, name))
        ]
        if len(others) != 1:
            words = f"{', '.join(others)[:200] or 'none'}; a table does not say which are rewards "
            words += """and which were logged: add --format_settings='{"rewards": ["..."]}'"""
            wrong(line, "", "one column of numbers", Words(words))
        return others


def _values(rows: Sequence[tuple[object, Mapping[str, Any]]], name: str) -> list[Any]:
    """The values of a column."""
    return [row[name] for _, row in rows]
