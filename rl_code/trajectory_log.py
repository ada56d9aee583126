"""The trajectories of a run, as people and the report read them: tokens, calls, answers, rewards.

    trajectories/step_000012.jsonl.gz     those of one step of training, one group per line
    trajectories/held_out.before.jsonl.gz those of an evaluation, by suite and label

A run that resumes at step s repeats step s: files of steps >= s are dropped when the log opens.
Training itself never reads these files; it reads the store.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rl_code.documents import PADDING
from rl_code.files import write_atomically
from rl_code.metrics import json_line
from rl_code.types import Group, ToolCall, Trajectory, Turn

FOLDER = "trajectories"
_STEP = re.compile(r"step_(\d+)\.jsonl\.gz")
_SUFFIX = ".jsonl.gz"

_REPLACEMENT = "\ufffd"  # what a tokenizer's decode puts where bytes are not whole characters
_LONGEST_CHARACTER = 4  # bytes of one UTF-8 character: byte-level tokens that can share one


class TrajectoryLog:
    """Keeps the episodes of each step, tokens and all, in one gzip file per step.

    A line of ``trajectories/step_000012.jsonl.gz`` (read it with zcat) is one group:

      step, task_id, group
      task: path, entry_point, meta, reference (path -> text), files (path -> text at the start, of
        the files that calls name)
      prompt: ids [P], pieces [P] (the text of each token), text; with documents also documents [P]
        (what each place is, as in ``types.Context``). Shared by the trajectories.
      trajectories, each with
        index, status, reward {total, components, flags}, solved, malformed_calls,
        first_edit_passed, seconds
        ids, pieces, versions [T-P]: the tokens after the prompt; version -1 where not sampled
        logprobs [T-P]: the sampler's log-probability, null where not sampled
        documents [T-P]: as for the prompt
        turns: role, start, end (offsets into ids; the prompt's turn is left out), calls [{name,
          arguments, error}], results [{name, content, ok, seconds}]
        contexts: the tree, one for each: start (of its own tokens, an offset into ids), parent (an
          index, -1 for a root), kept (how many tokens of the whole parent stand before its own)

    Where several tokens share one character, the first has the text and the others have "". Padding
    of documents has no text.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        decode: Callable[[Sequence[int]], str],
        resume_step: int | None = 0,
    ) -> None:
        """Opens the log and removes the files of steps >= ``resume_step``, or none if it is None.

        Args:
          decode: token ids -> text, special tokens included.
        """
        self._workdir = Path(workdir)
        (self._workdir / FOLDER).mkdir(parents=True, exist_ok=True)
        for step in trajectory_steps(workdir):
            if resume_step is not None and step >= resume_step:
                trajectory_path(workdir, step).unlink()
        self._decode = decode
        self._known: dict[int, str] = {}

    def append(self, step: int, groups: Sequence[Group]) -> None:
        """Writes the groups of one step. Raises OSError, leaving no file, when the disk is full."""
        self._write(trajectory_path(self._workdir, step), step, groups)

    def write_evaluation(self, name: str, step: int, groups: Sequence[Group]) -> None:
        """Writes the groups of an evaluation. name: "<suite>.<label>". Raises as ``append``."""
        self._write(evaluation_path(self._workdir, name), step, groups)

    def _write(self, path: Path, step: int, groups: Sequence[Group]) -> None:
        text = "".join(json_line(self._record(step, group)) for group in groups)
        compressed = gzip.compress(text.encode("utf-8", "surrogatepass"), compresslevel=3, mtime=0)
        write_atomically(path, compressed)

    def _record(self, step: int, group: Group) -> dict[str, Any]:
        first = group.trajectories[0]
        task = group.task
        return {
            "step": step,
            "task_id": task.id,
            "group": first.group,
            "task": {
                "path": task.path,
                "entry_point": task.entry_point,
                "meta": dict(task.meta),
                "reference": dict(task.reference),
                "files": _named_files(group),
            },
            "prompt": self._prompt(first),
            "trajectories": [self._trajectory(trajectory) for trajectory in group.trajectories],
        }

    def _prompt(self, first: Trajectory) -> dict[str, Any]:
        part = slice(first.prompt_length)
        tokens = first.tokens[part]
        if first.documents is not None:
            tokens = tokens[first.documents[part] != PADDING]
        return self._texts(first, part) | {"text": self._decode(tokens.tolist())}

    def _texts(self, trajectory: Trajectory, part: slice) -> dict[str, list]:
        """Ids and pieces of a part of all tokens, and what they are in a run with documents."""
        ids = trajectory.tokens[part].tolist()
        if trajectory.documents is None:
            return {"ids": ids, "pieces": self._pieces(ids)}
        documents = trajectory.documents[part].tolist()
        pieces: list[str] = []
        runs = itertools.groupby(zip(ids, documents, strict=True), key=lambda pair: pair[1])
        for kind, pairs in runs:
            own = [id for id, _ in pairs]
            pieces += [""] * len(own) if kind == PADDING else self._pieces(own)
        return {"ids": ids, "pieces": pieces, "documents": documents}

    def _trajectory(self, trajectory: Trajectory) -> dict[str, Any]:
        start = trajectory.prompt_length
        # the offset of each context in ids; that of the first is that of the prompt, which is not
        # part of ids
        lengths = [len(context.tokens) for context in trajectory.contexts]
        offsets = [sum(lengths[:index]) - start for index in range(len(lengths))]
        chosen = zip(trajectory.sampled[start:], trajectory.logprobs[start:], strict=True)
        return {
            "index": trajectory.index,
            "status": trajectory.status,
            "reward": {
                "total": trajectory.reward.total,
                "components": dict(trajectory.reward.components),
                "flags": list(trajectory.reward.flags),
            },
            "solved": trajectory.solved,
            "malformed_calls": trajectory.malformed_calls,
            "first_edit_passed": trajectory.first_edit_passed,
            "seconds": {name: round(seconds, 4) for name, seconds in trajectory.seconds.items()},
            **self._texts(trajectory, slice(start, None)),
            "logprobs": [
                round(float(logprob), 4) if sampled else None for sampled, logprob in chosen
            ],
            "versions": [int(version) for version in trajectory.versions[start:]],
            "turns": [
                _turn(turn, offsets[turn.context])
                for turn in trajectory.turns
                if turn.role != "prompt"
            ],
            "contexts": [
                {"start": max(offset, 0), "parent": context.parent, "kept": context.kept}
                for offset, context in zip(offsets, trajectory.contexts, strict=True)
            ],
        }

    def _pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token, such that the pieces together are the text of all."""
        pieces = []
        i = 0
        while i < len(ids):
            if ids[i] not in self._known:
                self._known[ids[i]] = self._decode([ids[i]])
            text = self._known[ids[i]]
            length = 1
            if _REPLACEMENT in text:
                for end in range(i + 2, min(i + _LONGEST_CHARACTER, len(ids)) + 1):
                    joined = self._decode(ids[i:end])
                    if _REPLACEMENT not in joined:
                        text = joined
                        length = end - i
                        break
            pieces += [text, *[""] * (length - 1)]
            i += length
        return pieces


def trajectory_steps(workdir: str | os.PathLike[str]) -> list[int]:
    """The steps whose trajectories are on disk, in order."""
    found = (_STEP.fullmatch(file.name) for file in (Path(workdir) / FOLDER).glob(f"*{_SUFFIX}"))
    return sorted(int(match[1]) for match in found if match)


def evaluation_names(workdir: str | os.PathLike[str]) -> list[str]:
    """The evaluations whose trajectories are on disk, as "<suite>.<label>", oldest first."""
    files = [
        file
        for file in (Path(workdir) / FOLDER).glob(f"*{_SUFFIX}")
        if not _STEP.fullmatch(file.name)
    ]
    files.sort(key=lambda file: (file.stat().st_mtime_ns, file.name))
    return [file.name.removesuffix(_SUFFIX) for file in files]


def read_trajectories(workdir: str | os.PathLike[str], step: int) -> list[dict[str, Any]]:
    """One step's groups as ``TrajectoryLog`` documents them. Raises FileNotFoundError, ValueError
    if damaged.
    """
    return read_groups(trajectory_path(workdir, step))


def read_groups(path: Path) -> list[dict[str, Any]]:
    """The groups of one file. Raises as ``read_trajectories``."""
    try:
        text = gzip.decompress(path.read_bytes()).decode("utf-8", "surrogatepass")
        return [json.loads(line) for line in text.split("\n")[:-1]]
    except (EOFError, gzip.BadGzipFile, ValueError) as error:
        raise ValueError(f"{path}: damaged: {error}") from error


def evaluation_path(workdir: str | os.PathLike[str], name: str) -> Path:
    """The file of an evaluation's trajectories. name: "<suite>.<label>"."""
    return Path(workdir) / FOLDER / f"{name}{_SUFFIX}"


def _named_files(group: Group) -> dict[str, str]:
    """The files of the task that a call names, whole: what an edit is compared with."""
    named = {group.task.path}
    for trajectory in group.trajectories:
        for turn in trajectory.turns:
            named |= {call.arguments.get("path") for call in turn.calls if _plain_path(call)}
    return {path: text for path, text in group.task.files.items() if path in named}


def _plain_path(call: ToolCall) -> bool:
    return isinstance(call.arguments, dict) and isinstance(call.arguments.get("path"), str)


def _turn(turn: Turn, offset: int) -> dict[str, Any]:
    return {
        "role": turn.role,
        "start": turn.start + offset,
        "end": turn.end + offset,
        "calls": [
            {"name": c.name, "arguments": dict(c.arguments), "error": c.error} for c in turn.calls
        ],
        "results": [
            {"name": r.name, "content": r.content, "ok": r.ok, "seconds": round(r.seconds, 4)}
            for r in turn.results
        ],
    }


def trajectory_path(workdir: str | os.PathLike[str], step: int) -> Path:
    """The file of one step's trajectories."""
    return Path(workdir) / FOLDER / f"step_{step:06}{_SUFFIX}"
