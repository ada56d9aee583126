"""Patches that agents handed in, in the form that SWE-bench's own programs grade.

A line for each task: ``instance_id``, ``model_name_or_path`` and ``model_patch``, a patch that
``git apply`` takes at the commit that the task starts from. Work that was not handed in is an empty
patch. What git ignores there, and what tools cached, is left out.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path

from absl import logging

from rl_code.environment.layers.store import LayerStore
from rl_code.environment.sandbox.snapshot import File, Snapshot
from rl_code.host.files import write_atomically
from rl_code.tasks.patches import Scratch
from rl_code.tasks.worlds import git_folder
from rl_code.types import Task


class Predictions:
    """Collects patches of episodes, from any thread.

    store: the layer store of the tasks' worlds; None where no task has one.
    """

    def __init__(self, model: str, store: LayerStore | None):
        self._model = model
        self._store = store
        self._lock = threading.Lock()
        # By the episode's index in its group, and by the task's id.
        self._patches: dict[int, dict[str, str]] = {}

    def add(self, task: Task, index: int, work: Snapshot | None) -> None:
        """Takes what an episode handed in; None for nothing."""
        try:
            patch = "" if work is None else patch_of(task, work, self._store)
        except (ValueError, OSError) as error:  # names of files that git does not take
            logging.warning("the work on task %s is no patch: %s", task.id, error)
            patch = ""
        with self._lock:
            self._patches.setdefault(index, {})[task.id] = patch

    def save(self, path: Path) -> list[Path]:
        """Writes a file for each episode of a group, since a file may name a task once: ``path``
        for the first, ``name.1.jsonl`` for the second, and so on. Returns their paths.
        """
        written = []
        for number, index in enumerate(sorted(self._patches)):
            patches = self._patches[index]
            rows = [
                {"instance_id": id, "model_name_or_path": self._model, "model_patch": patches[id]}
                for id in sorted(patches)
            ]
            file = path.with_suffix(f".{number}{path.suffix}") if number else path
            file.parent.mkdir(parents=True, exist_ok=True)
            text = "".join(json.dumps(row) + "\n" for row in rows)
            if path.suffix == ".json":
                text = json.dumps(rows, indent=1) + "\n"
            write_atomically(file, text.encode())
            written.append(file)
        return written


def patch_of(task: Task, work: Snapshot, store: LayerStore | None) -> str:
    """The patch that makes ``work``, a snapshot of the task's workspace, of what it started from:
    the commit of the world's repository, or the task's own files.
    """
    folder = None
    if task.world is not None and store is not None:
        folder = git_folder(store, task.world)
    with Scratch([folder] if folder else []) as scratch:
        head = scratch.head_of(folder) if folder else scratch.empty()
        start = scratch.with_files(head, task.files)
        gone = {path: File(b"", kind="deleted") for path in task.files.keys() - work.keys()}
        after: Mapping[str, str | File] = {**gone, **work}
        known = set(scratch.paths(start))
        ignored = scratch.ignored(start, [path for path in after if path not in known])
        if ignored:
            logging.info("task %s: git ignores %d new files", task.id, len(ignored))
        kept = {path: entry for path, entry in after.items() if path not in ignored}
        return scratch.patch(start, scratch.with_files(start, kept))
