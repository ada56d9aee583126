"""The trajectories that the page shows, in a form small enough to hold many.

They come from the steps of training and from evaluations. Without a search the page shows some
trajectories, spread over the run. With a search it shows those that were found among all on disk.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_code.foreign.dump import NOT_RECORDED, SOLVED
from rl_code.report.edits import with_diffs
from rl_code.run.trajectory_log import (
    evaluation_names,
    read_evaluation,
    read_trajectories,
    trajectory_steps,
)


@dataclasses.dataclass(frozen=True)
class GroupsOrigin:
    """Origin of groups: a step of training, or an evaluation."""

    run: str
    label: str
    # The step of training; -1 of an evaluation.
    step: int
    workdir: Path

    def groups(self) -> list[dict[str, Any]]:
        """Its groups. Raises ValueError or StoreError for a damaged file."""
        if self.step >= 0:
            return read_trajectories(self.workdir, self.step)
        return read_evaluation(self.workdir, self.label)


def sources(runs: Mapping[str, Path], steps: int | None) -> list[GroupsOrigin]:
    """The sources of all runs. steps: at most so many steps of each run, spread over it."""
    found = []
    for name, workdir in runs.items():
        available = trajectory_steps(workdir)
        chosen = spread(available, len(available) if steps is None else steps)
        training = [GroupsOrigin(name, f"step {step}", step, workdir) for step in chosen]
        held_out = [GroupsOrigin(name, label, -1, workdir) for label in evaluation_names(workdir)]
        # what a small page must hold first: the end and the beginning of training, evaluations
        found += [*training[:2], *held_out, *training[2:]]
    return found


def search_all(
    runs: Mapping[str, Path], text: str
) -> Iterator[tuple[GroupsOrigin, dict[str, Any]]]:
    """Every logged group with the trajectories that hold the text, whatever its case."""
    words = text.lower()
    for source in sources(runs, None):
        for group in source.groups():
            kept = [
                sample
                for sample in group["trajectories"]
                if words in haystack(group, sample).lower()
            ]
            if kept:
                yield source, {**group, "trajectories": kept}


def haystack(group: Mapping[str, Any], sample: Mapping[str, Any]) -> str:
    """Everything of a trajectory that a search looks at."""
    parts = [group["task_id"], sample["status"], *sample["reward"]["flags"]]
    # a word may lie in several tokens, so their pieces are joined without a break
    parts.append("".join(sample["pieces"]))
    for turn in sample["turns"]:
        parts += [call["name"] for call in turn["calls"]]
        parts += [result["content"] for result in turn["results"]]
    return "\n".join(parts)


def trajectories(
    runs: Mapping[str, Path], *, steps: int, per_source: int, room: int, search: str = ""
) -> dict[str, Any]:
    """Groups that fit in ``room`` bytes, with their tokens as numbers of a shared table.

    Args:
      runs: folder of each run by its name.
      steps, per_source: at most so many steps, and trajectories of one step or evaluation.
      search: only trajectories with this text, of all sources.
    """
    table = _TokenTable()
    kept: dict[GroupsOrigin, list[dict[str, Any]]] = {}
    read = 0
    offered: Iterator[tuple[GroupsOrigin, Mapping[str, Any]]]
    if search:
        offered = search_all(runs, search)
    else:
        offered = (
            (source, group)
            for source in sources(runs, steps)
            for group in choose(source.groups(), per_source)
        )
    for source, group in offered:
        read += len(group["trajectories"])
        known = len(table.entries)
        compact = _compact(group, table)
        size = _size(compact) + _size(table.entries[known:])
        if size <= room:
            room -= size
            kept.setdefault(source, []).append(compact)
        else:
            table.forget(known)
    order = sorted(
        kept, key=lambda source: (source.run, source.step < 0, source.step, source.label)
    )
    found = [
        {
            "run": source.run if len(runs) > 1 else "",
            "label": source.label,
            "step": source.step,
            "groups": sorted(kept[source], key=lambda group: group["group"]),
        }
        for source in order
    ]
    return {
        "tokens": table.entries,
        "sources": found,
        "logged": len(sources(runs, None)),
        "embedded": sum(len(group["samples"]) for groups in kept.values() for group in groups),
        "read": read,
        "search": search,
    }


def _size(data: Any) -> int:
    # "<" becomes six characters; some bytes more for what joins the text to its neighbours
    text = json.dumps(data, separators=(",", ":"))
    return len(text) + 5 * text.count("<") + 16


def spread(steps: Sequence[int], count: int) -> list[int]:
    """At most ``count`` of the steps: last, first, middles, so that any beginning of the list
    covers the run.
    """
    if len(steps) > count:
        steps = [steps[round(i * (len(steps) - 1) / max(count - 1, 1))] for i in range(count)]
    order = [*steps[-1:], *steps[:-1][:1]]
    spans = [(0, len(steps) - 1)]
    while spans:
        low, high = spans.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(steps[middle])
            spans += [(low, middle), (middle, high)]
    return order


def choose(groups: Sequence[Mapping[str, Any]], count: int) -> Iterator[Mapping[str, Any]]:
    """Whole groups of together at most ``count`` trajectories (the last may be cut), flagged and
    mixed ones first.
    """

    def interest(group: Mapping[str, Any]) -> int:
        samples = group["trajectories"]
        flagged = any(sample["reward"]["flags"] for sample in samples)
        return -2 * flagged - (len({sample["solved"] for sample in samples}) > 1)

    for group in sorted(groups, key=interest):
        if count > 0:
            yield {**group, "trajectories": group["trajectories"][:count]}
        count -= len(group["trajectories"])


class _TokenTable:
    """Distinct (id, text) pairs, numbered in order of appearance."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, str]] = []
        self._index: dict[tuple[int, str], int] = {}

    def index(self, id: int, text: str) -> int:
        if (id, text) not in self._index:
            self._index[id, text] = len(self.entries)
            self.entries.append((id, text))
        return self._index[id, text]

    def forget(self, length: int) -> None:
        """Shortens the table to what it was when it had ``length`` entries."""
        for entry in self.entries[length:]:
            del self._index[entry]
        del self.entries[length:]


def _compact(group: Mapping[str, Any], table: _TokenTable) -> dict[str, Any]:
    """A logged group with tokens as numbers of the table and log-probabilities in hundredths of a
    nat.
    """
    kept = ("index", "status", "reward", "malformed_calls", "first_edit_passed", "seconds")
    # of a run of another trainer, whose dump does not say who solved the task
    unjudged = group["task"]["meta"].get(SOLVED) == NOT_RECORDED
    samples = []
    for sample in group["trajectories"]:
        pairs = zip(sample["ids"], sample["pieces"], strict=True)
        samples.append(
            {name: sample[name] for name in kept}
            | {
                "passed": None if unjudged else sample["solved"],
                "turns": with_diffs(sample["turns"], group["task"]["files"]),
                "tokens": [table.index(*pair) for pair in pairs],
                "logprobs": [_hundredths(value) for value in sample["logprobs"]],
                "versions": _runs(sample["versions"]),
            }
            # only in a run with documents
            | ({"documents": _runs(sample["documents"])} if "documents" in sample else {})
            # only of sub-agents, and of agents that rewrote their history
            | ({"contexts": sample["contexts"]} if len(sample["contexts"]) > 1 else {})
        )
    return {
        "task_id": group["task_id"],
        "group": group["group"],
        "task": {name: value for name, value in group["task"].items() if name != "files"},
        "prompt": group["prompt"]["text"],
        "prompt_tokens": len(group["prompt"]["ids"]),
        "samples": samples,
    }


def _hundredths(logprob: float | str | None) -> int | str | None:
    return round(100 * logprob) if isinstance(logprob, int | float) else logprob


def _runs(values: Sequence[int]) -> list[list[int]]:
    """Run lengths: [value, count] pairs."""
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1][1] += 1
        else:
            runs.append([value, 1])
    return runs
