"""Evaluations of the package verifiers (version 0.4): the file ``traces.jsonl`` of a run's folder.

An evaluation has no steps: all of it is step 0. Episodes are written in the order in which they
end, which is chance, so groups are put in the order of their tasks and episodes in that of their
content.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rl_code.foreign.dump import DumpedGroup, Episode, Found
from rl_code.foreign.reading import Lines, Words, files_of, wrong
from rl_code.foreign.traces import Trace, episode_of, traces_of


@dataclasses.dataclass(frozen=True)
class Verifiers:
    """Reader of such files."""

    lacks: ClassVar[str] = (
        "steps; token ids and log-probabilities where the client spoke to a chat API; the "
        "trainer's log-probabilities where no trainer noted them"
    )

    def find(self, paths: Sequence[Path]) -> Found:
        """Step 0 -> the files. Raises DumpError."""
        what = "traces.jsonl of an evaluation of verifiers"
        return Found({0: files_of(paths, ["traces.jsonl"], what)})

    def read(self, step: int, place: list[Path]) -> Sequence[DumpedGroup]:
        """The groups of all files. Raises DumpError."""
        found = []
        for path in place:
            with Lines(path) as lines:
                for line, row in lines:
                    found += [(trace, episode_of(trace)) for trace in traces_of(line, row)]
        if not found:
            wrong(", ".join(map(str, place)), "", "a line for each episode", Words("none"))
        return in_order(found)


def in_order(found: Iterable[tuple[Trace, Episode]]) -> list[DumpedGroup]:
    """Groups of traces, in an order that does not depend on when each of them ended."""
    groups: dict[str, list[tuple[Trace, Episode]]] = {}
    for trace, episode in found:
        groups.setdefault(trace.group(), []).append((trace, episode))
    made = []
    for own in groups.values():
        own.sort(key=lambda pair: content(pair[1]))
        first = own[0][0]
        made.append(
            DumpedGroup(
                first.task_id(),
                first.messages(),
                first.meta(),
                tuple(episode for _, episode in own),
            )
        )
    made.sort(key=lambda group: (group.task_id, [content(one) for one in group.episodes]))
    return made


def content(episode: Episode) -> Any:
    """Key by which episodes are put in order: their texts and their reward."""
    texts = [span.text for branch in episode.branches for span in branch.spans]
    return texts, repr(episode.reward)
