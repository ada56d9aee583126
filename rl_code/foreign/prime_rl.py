"""Training runs of prime-rl: traces of verifiers, and what is noted of them later.

Its layouts differ by version, so lines are told apart by what they hold and not by their names:

    rollouts/step_<n>/train_rollouts.jsonl                      a trace a line
    rollouts/step_<n>/<train|eval>/<all|effective>/traces.jsonl  a trace a line
    traces/step_<n>/<train|eval>/traces.jsonl                   an episode a line
    traces/step_<n>/<train|eval>/annotations/*.jsonl            a note a line
    a stream of 00000.jsonl, 00001.jsonl.zst and so on          an episode a line
    annotations/<producer>/00000.jsonl and so on                a note a line

A note names a trace. It tells the step that trained on it, and the trainer's log-probabilities of
each branch. Notes are folded onto traces in the order in which they stand, the orchestrator's
before the trainer's.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from rl_code.foreign.dump import DumpedGroup, Found
from rl_code.foreign.reading import Line, Lines, Words, files_of, show, wrong
from rl_code.foreign.traces import Trace, episode_of, parents_of, paths_of, section, traces_of
from rl_code.foreign.verifiers import in_order

_STEP = re.compile(r"step_(\d{1,9})")
# Notes of each trace that are read, at most.
_MOST_NOTES = 1000
# Files that are open at once.
_MOST_OPEN = 64


@dataclasses.dataclass(frozen=True)
class _Place:
    """A trace of a line: its index among those of the line, and the lines of its notes."""

    line: Line
    index: int
    notes: tuple[Line, ...]


@dataclasses.dataclass(frozen=True)
class PrimeRl:
    """Reader of such folders."""

    # Work of the run whose episodes are taken.
    kind: Literal["train", "eval"] = "train"
    # "effective": what an update was made of, by the step of that update, where the run notes it;
    # "all": whatever came back, by the step at which it did.
    subset: Literal["effective", "all"] = "effective"

    lacks: ClassVar[str] = (
        "versions of the weights of each token where several sampled an episode; routed experts; "
        "sampling masks; digits of log-probabilities behind the fourth; the trainer's "
        "log-probabilities where it noted none"
    )

    def find(self, paths: Sequence[Path]) -> Found:
        """Step -> its traces. Raises DumpError."""
        what = "traces of prime-rl"
        files = files_of(paths, ["*.jsonl", "*.jsonl.zst"], what)
        passed: Counter[str] = Counter()
        notes: dict[str, list[Line]] = {}
        told: dict[str, dict[str, Any]] = {}  # what notes say of each trace, without streams
        traces: dict[str, tuple[Trace, Line, int]] = {}
        # those of the orchestrator come first
        for path in sorted(files, key=lambda path: ("trainer" in str(path), str(path))):
            if path.name.startswith(("index.", "metrics.")) or "live" in path.parts:
                continue
            with Lines(path) as lines:
                for line, row in lines:
                    if isinstance(row.get("trace_id"), str) and "branches" in row:
                        notes.setdefault(row["trace_id"], []).append(line)
                        told.setdefault(row["trace_id"], {}).update(section(row, "info"))
                    elif "traces" in row or "nodes" in row:
                        traces |= self._taken(line, row, traces, passed)
                    else:
                        break  # metrics, an index, or another thing of the run
        # without any such note the folders say the steps
        shipped = any(self._trained(info) is not None for info in told.values())
        steps: dict[int, list[_Place]] = {}
        for id, (trace, line, index) in traces.items():
            step = self._step(trace, line, told.get(id), shipped)
            if step is None:
                passed["episodes that no update was made of"] += 1
                continue
            own = _Place(line, index, tuple(notes.get(id, ())[:_MOST_NOTES]))
            steps.setdefault(step, []).append(own)
        if not steps:
            left = _counted(passed) or "no line that is an episode or a trace"
            wrong(", ".join(map(str, paths)), "", f"{what} ({self.kind})", Words(left))
        return Found(steps, _counted(passed))

    def read(self, step: int, place: list[_Place]) -> Sequence[DumpedGroup]:
        """The groups of a step. Raises DumpError."""
        found = []
        with _Opened() as opened:
            for own in place:
                row = opened.at(own.line)
                trace = traces_of(own.line, row)[own.index]
                notes = [(line, opened.at(line)) for line in own.notes]
                whole = _with_info(trace, notes)
                found.append((whole, episode_of(whole, dict(_trainer(trace, notes)))))
        return in_order(found)

    def _taken(
        self, line: Line, row: Mapping[str, Any], known: Mapping[str, Any], passed: Counter[str]
    ) -> dict[str, tuple[Trace, Line, int]]:
        """The traces of a line that are asked for, without their nodes, by id."""
        found = {}
        for index, trace in enumerate(traces_of(line, row)):
            if _kind(trace, line.path) != self.kind:
                passed[f"traces of other work than {self.kind}"] += 1
                continue
            parts = line.path.parts
            other = "all" if self.subset == "effective" else "effective"
            if trace.id in known and other in parts:
                continue  # a second copy of it
            # what tells the step, and not what fills the memory
            own = {key: trace.content[key] for key in ("id", "info") if key in trace.content}
            episode = {key: trace.episode[key] for key in ("run",) if key in trace.episode}
            found[trace.id] = (Trace(trace.place, own, episode), line, index)
        return found

    def _step(
        self, trace: Trace, line: Line, told: Mapping[str, Any] | None, shipped: bool
    ) -> int | None:
        """The step that a trace belongs to; None for one that no update was made of. Raises
        DumpError where nothing says the step.
        """
        info = {**trace.info, **(told or {})}
        folder = [match for part in line.path.parts if (match := _STEP.fullmatch(part))]
        of_folder = int(folder[-1][1]) if folder else None
        work = section(section(trace.episode, "run"), "work").get("step")
        arrived = section(info, "arrival").get("step")
        logged = section(info, self.kind).get("logged_at_step")
        trained = self._trained(info)
        if self.subset == "effective" and shipped:
            return trained
        for step in (trained, of_folder, arrived, logged, work):
            if _whole(step):
                return step
        return wrong(line, "", "a step, in the folder's name or the trace", Words(trace.id))

    def _trained(self, info: Mapping[str, Any]) -> int | None:
        """The step of the update that was made of a trace, by what notes say; None for none."""
        steps = section(info, "ship").get("step"), section(info, self.kind).get("trained_at_step")
        return next((step for step in steps if _whole(step)), None)


class _Opened:
    """Files that stay open for the lines of a step. A context manager."""

    def __init__(self) -> None:
        self._files: dict[Path, Lines] = {}

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *_: object) -> None:
        for lines in self._files.values():
            lines.__exit__()

    def at(self, line: Line) -> dict[str, Any]:
        """A line once more."""
        if line.path not in self._files:
            if len(self._files) >= _MOST_OPEN:
                self._files.pop(next(iter(self._files))).__exit__()
            self._files[line.path] = Lines(line.path)
        return self._files[line.path].at(line)


def _counted(passed: Counter[str]) -> str:
    """Counts of episodes that were passed over, in words."""
    return ", ".join(f"{count} {what}" for what, count in sorted(passed.items()))


def _whole(step: Any) -> bool:
    return type(step) is int and 0 <= step < 1 << 31


def _kind(trace: Trace, path: Path) -> str:
    """The work that an episode was for: "train" or "eval"."""
    run = section(trace.episode, "run")
    for found in (trace.info.get("kind"), section(run, "work").get("type"), run.get("type")):
        if found in ("train", "eval"):
            return found
    return "eval" if "eval" in path.parts or path.name.startswith("eval_") else "train"


def _with_info(trace: Trace, notes: Sequence[tuple[Line, Mapping[str, Any]]]) -> Trace:
    """The trace with what notes say of it."""
    info = dict(trace.info)
    for _, note in notes:
        info |= section(note, "info")
    return dataclasses.replace(trace, content={**trace.content, "info": info})


def _trainer(
    trace: Trace, notes: Sequence[tuple[Line, Mapping[str, Any]]]
) -> Iterator[tuple[int, np.ndarray]]:
    """(node, the trainer's log-probabilities of its sampled tokens) of what notes say; the newest
    last. A stream of a branch has a value for each token, null where it is not known.
    """
    nodes = trace.content["nodes"]
    paths = paths_of(parents_of(trace.place, nodes)) if notes else []
    for line, note in notes:
        branches = note["branches"]
        if not isinstance(branches, list):
            wrong(line, "branches", "a list", branches)
        for branch in branches:
            if not isinstance(branch, dict):
                wrong(line, "branches", "objects", branch)
            stream = branch.get("trainer_logprobs")
            if stream is None:
                continue
            index = branch.get("index")
            if not _whole(index) or index >= len(paths):
                words = Words(f"{show(index)}; the trace has {len(paths)} branches")
                wrong(line, "index", "the number of a branch", words)
            if not isinstance(stream, list):
                wrong(line, "trainer_logprobs", "a list", stream)
            yield from _of_branch(line, stream, [(node, nodes[node]) for node in paths[index]])


def _of_branch(
    line: Line, stream: Sequence[Any], path: Sequence[tuple[int, Mapping[str, Any]]]
) -> Iterator[tuple[int, np.ndarray]]:
    begin = 0
    for number, node in path:
        mask = node.get("mask") or []
        if not isinstance(mask, list):
            wrong(line, f"mask of node {number}", "a list", mask)
        own = stream[begin : begin + len(mask)]
        begin += len(mask)
        if len(own) < len(mask):
            return  # a stream that was cut says nothing of the rest
        values = [value for value, sampled in zip(own, mask, strict=True) if sampled]
        if not values or any(value is None for value in values):
            continue
        if not all(type(value) in (int, float) for value in values):
            wrong(line, "trainer_logprobs", "numbers or nulls", values)
        yield number, np.asarray(values, np.float32)
