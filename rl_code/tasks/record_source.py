"""Source of tasks in files of one's own (``records``)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rl_code.environment.sandbox.pool import SandboxPool
from rl_code.tasks import record_suites, records
from rl_code.tasks.differential import DifferentialConfig, mutations, strengthened
from rl_code.tasks.forms import Form
from rl_code.tasks.row_files import Read
from rl_code.tasks.source import SourceOfRows, store_of
from rl_code.tasks.worlds import Places
from rl_code.types import Task


@dataclasses.dataclass(frozen=True)
class Records(SourceOfRows):
    """JSON lines or Parquet of one's own."""

    # The file: .jsonl, .jsonl.gz or .parquet.
    path: str
    # Field of ``COLUMNS`` -> column of the file.
    columns: Mapping[str, str]
    # Only rows of this split, and rows that name no split, are kept; "" keeps all.
    split: str = ""
    # Form in which a message that is a plain text is put to the agent, see ``forms``.
    form: Form = "agent"
    # Adds hidden tests whose expected values come from the reference.
    differential: DifferentialConfig | None = None
    # Folders of the repositories and packages of tasks with suites.
    places: Places = Places()

    def read(self, pool: SandboxPool | None) -> Iterator[Read]:
        suites = functools.partial(
            record_suites.make, places=self.places, store=lambda: store_of(pool, "records")
        )
        return records.each(self.path, self.columns, self.form, suites)

    def finish(
        self, every: Sequence[Task], pool: SandboxPool | None, workdir: Path | None
    ) -> Sequence[Task]:
        splits = ("", self.split)
        tasks = [task for task in every if not self.split or task.meta["split"] in splits]
        return strengthened(
            tasks, mutations, self.differential, pool, workdir, f"records {self.split}", every
        )
