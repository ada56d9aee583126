"""JSON lines that verl writes for each step, where ``trainer.rollout_data_dir`` names a folder.

``<folder>/<step>.jsonl`` has a line for each response: ``input`` and ``output`` (decoded, without
special tokens), ``gts`` (the ground truth, or null), ``score`` (the sum of the token's scores),
``step``, and what the reward function returned beside its score. The trainers write ``uid``
(``<sample>_<rollout>_<output>``) or ``request_id`` too, where they have it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rl_code.foreign.dump import Branch, DumpedGroup, Episode, Found
from rl_code.foreign.messages import answer_spans, prompt_spans
from rl_code.foreign.reading import (
    Lines,
    Words,
    digest,
    files_of,
    number_of,
    whole_number,
    wrong,
)

_KNOWN = {"input", "output", "gts", "score", "step", "uid", "request_id"}


@dataclasses.dataclass(frozen=True)
class Verl:
    """Reader of such folders."""

    lacks: ClassVar[str] = (
        "token ids, special tokens, log-probabilities of sampler and trainer, advantages, versions "
        "of the weights, borders of turns"
    )

    def find(self, paths: Sequence[Path]) -> Found:
        """Step -> its file. Raises DumpError."""
        files = files_of(paths, ["*.jsonl"], "<step>.jsonl of verl's trainer.rollout_data_dir")
        found: dict[int, Path] = {}
        for path in files:
            if not path.stem.isdecimal():
                wrong(path, "", "a file named <step>.jsonl", Words(path.name))
            step = int(path.stem)
            if step in found:
                wrong(path, "", f"one file of step {step}", Words(f"{found[step]} as well"))
            found[step] = path
        return Found(found)

    def read(self, step: int, place: Path) -> Sequence[DumpedGroup]:
        """The groups of a step, in the order of their first lines. Raises DumpError."""
        groups: dict[Any, list[tuple[Any, Episode]]] = {}
        with Lines(place) as lines:
            for line, row in lines:
                for field in ("input", "output"):
                    if not isinstance(row.get(field), str):
                        wrong(line, field, "a text", row.get(field, Words("no such field")))
                if whole_number(line, "step", row.get("step", step)) != step:
                    wrong(line, "step", f"{step}, as the file's name says", row["step"])
                task = {"input": row["input"], "gts": row.get("gts")}
                # the number of a sample in its step, where the trainer writes it
                key = digest([task, _sample(row.get("uid"))])
                groups.setdefault(key, []).append((task, self._episode(line, row)))
        if not groups:
            wrong(place, "", "a line for each response", Words("an empty file"))
        return [
            DumpedGroup(
                f"verl-{digest(found[0][0])}",
                ({"role": "user", "content": found[0][0]["input"]},),
                {"gts": found[0][0]["gts"]},
                tuple(episode for _, episode in found),
            )
            for found in groups.values()
        ]

    @staticmethod
    def _episode(line: object, row: Mapping[str, Any]) -> Episode:
        score = number_of(line, "score", row.get("score", Words("no such field")))
        spans = prompt_spans(line, "input", row["input"]) + answer_spans(
            line, "output", row["output"]
        )
        extra = {name: value for name, value in row.items() if name not in _KNOWN}
        numbers = {
            name: float(value)
            for name, value in extra.items()
            if isinstance(value, bool | int | float) and abs(value) < 1e300
        }
        rest = {name: value for name, value in extra.items() if name not in numbers}
        notes = {name: row[name] for name in ("uid", "request_id") if name in row} | rest
        return Episode(
            (Branch(tuple(spans)),),
            score,
            {"score": score},
            scores=numbers,
            notes=notes,
            place=str(line),
        )


def _sample(uid: Any) -> str | None:
    """The sample of a key <sample>_<rollout>_<output>; None for anything else."""
    parts = uid.rsplit("_", 2) if isinstance(uid, str) else []
    return parts[0] if len(parts) == 3 and parts[1].isdecimal() and parts[2].isdecimal() else None
