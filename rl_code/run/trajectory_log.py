"""The trajectories of a run, as people and the report read them: tokens, calls, answers, rewards.

Those of training are read from the record (``store``) and put into words when somebody asks. Those
of an evaluation are no part of the record and have a file of their own, by suite and label:

    trajectories/held_out.before.jsonl.gz

Training itself never reads any of this; it reads the store.
"""

from __future__ import annotations

import functools
import gzip
import itertools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from models import pretrained
from rl_code.environment.documents import PADDING
from rl_code.host.files import write_atomically
from rl_code.learner.monte_carlo import borders_of
from rl_code.metrics.values import json_line
from rl_code.run import origin
from rl_code.run.workdir import STORE
from rl_code.store import steps as steps_lib
from rl_code.store.store import GroupStore
from rl_code.types import Group, ToolCall, Trajectory, Turn

FOLDER = "trajectories"
_SUFFIX = ".jsonl.gz"

_REPLACEMENT = "\ufffd"  # what a tokenizer's decode puts where bytes are not whole characters
_LONGEST_CHARACTER = 4  # bytes of one UTF-8 character: byte-level tokens that can share one

type Decode = Callable[[Sequence[int]], str]  # token ids -> text, special tokens included


class Words:
    """Puts groups into words, tokens and all. A group becomes:

      step, task_id, group
      task: path, entry_point, meta, reference (path -> text), files (path -> text at the start, of
        the files that calls name)
      prompt: ids [P], pieces [P] (the text of each token), text; with documents also documents [P]
        (what each place is, as in ``types.Context``). Shared by the trajectories.
      trajectories, each with
        index, status, reward {total, components, flags, and notes if there are any}, solved,
        malformed_calls, first_edit_passed, seconds
        ids, pieces, versions [T-P]: the tokens after the prompt; version -1 where not sampled
        logprobs [T-P]: the sampler's log-probability, null where not sampled
        documents [T-P]: as for the prompt
        turns: role, context (an index), start, end (offsets into ids; turns of prompts are left
          out), calls [{name, arguments, error}], results [{name, content, ok, seconds}]
        contexts: the tree, one for each: start (of its own tokens, an offset into ids), parent (an
          index, -1 for a root), kept (how many tokens of the whole parent stand before its own)
        borders, in a run with continuations: turn (messages before it), place (an offset into ids),
          value (the mean return of the continuations), solved and count of these

    Where several tokens share one character, the first has the text and the others have "". Padding
    of documents has no text.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._known: dict[int, str] = {}

    def lines(self, step: int, groups: Sequence[Group]) -> str:
        """A line of strict JSON for each group."""
        return "".join(json_line(self._record(step, group)) for group in groups)

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
            "trajectories": [
                self._trajectory(trajectory) | _borders(group, trajectory)
                for trajectory in group.trajectories
            ],
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
                # what judges and models said of the work
                **({"notes": dict(notes)} if (notes := trajectory.reward.notes) else {}),
            },
            "solved": trajectory.solved,
            "malformed_calls": trajectory.malformed_calls,
            "first_edit_passed": trajectory.first_edit_passed,
            **_where_set(trajectory),
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


def _where_set(trajectory: Trajectory) -> dict[str, Any]:
    """Fields that most trajectories lack."""
    found = {"milestones": trajectory.milestones, "demonstrated": trajectory.demonstrated}
    return {name: value for name, value in found.items() if value is not None}


def write_evaluation(
    workdir: str | os.PathLike[str], name: str, step: int, groups: Sequence[Group], decode: Decode
) -> None:
    """Writes the groups of an evaluation. name: "<suite>.<label>". Raises OSError, leaving no file,
    when the disk is full.
    """
    path = evaluation_path(workdir, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = Words(decode).lines(step, groups).encode("utf-8", "surrogatepass")
    write_atomically(path, gzip.compress(text, compresslevel=3, mtime=0))


def trajectory_steps(workdir: str | os.PathLike[str]) -> list[int]:
    """The steps of training whose trajectories are on record, in order."""
    store = Path(workdir) / STORE
    return GroupStore(store).consumed() if steps_lib.exists(store) else []


def read_trajectories(workdir: str | os.PathLike[str], step: int) -> list[dict[str, Any]]:
    """The groups that a step was trained on, as ``Words`` puts them. Raises StoreError for a step
    that is not on record, and ConfigError for a workdir without the run's tokenizer.
    """
    store = GroupStore(Path(workdir) / STORE)
    trained = [item.number for item in store.items(step) if item.trained]
    groups = [store.record(step, number).group for number in trained]
    return _parsed(words_of(Path(workdir)).lines(step, groups))


def words_of(workdir: Path) -> Words:
    """Converter of a run's groups into words, with the tokenizer that its workdir holds."""
    return _words_of(origin.kept_by(workdir))


@functools.lru_cache(maxsize=8)
def _words_of(folder: Path) -> Words:
    return Words(pretrained.read_tokenizer(folder).decode)


def evaluation_names(workdir: str | os.PathLike[str]) -> list[str]:
    """The evaluations whose trajectories are on disk, as "<suite>.<label>", oldest first."""
    files = list((Path(workdir) / FOLDER).glob(f"*{_SUFFIX}"))
    files.sort(key=lambda file: (file.stat().st_mtime_ns, file.name))
    return [file.name.removesuffix(_SUFFIX) for file in files]


def read_evaluation(workdir: str | os.PathLike[str], name: str) -> list[dict[str, Any]]:
    """The groups of an evaluation, as ``Words`` puts them. Raises FileNotFoundError, ValueError if
    the file is damaged.
    """
    path = evaluation_path(workdir, name)
    try:
        return _parsed(gzip.decompress(path.read_bytes()).decode("utf-8", "surrogatepass"))
    except (EOFError, gzip.BadGzipFile, ValueError) as error:
        raise ValueError(f"{path}: damaged: {error}") from error


def _parsed(lines: str) -> list[dict[str, Any]]:
    # not splitlines: JSON may hold other characters that end a line
    return [json.loads(line) for line in lines.split("\n")[:-1]]


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


def _borders(group: Group, trajectory: Trajectory) -> dict[str, Any]:
    """The field ``borders`` of a trajectory (``Words``)."""
    if group.continuations is None:
        return {}
    found = [
        {
            "turn": border.fork.turn,
            "place": border.fork.lengths[0] - trajectory.prompt_length,
            "value": border.value,
            "solved": border.solved,
            "count": len(border.returns),
        }
        for border in borders_of(group, trajectory.index)
    ]
    return {"borders": found}


def _plain_path(call: ToolCall) -> bool:
    return isinstance(call.arguments, dict) and isinstance(call.arguments.get("path"), str)


def _turn(turn: Turn, offset: int) -> dict[str, Any]:
    return {
        "role": turn.role,
        "context": turn.context,
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
