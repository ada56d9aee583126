"""A workdir made of a dump: its record can be read, searched and compared as that of a run of ours.

    config.json     the format, its settings and the tokenizer, under the key ``imported_from``
    starts.jsonl    when it was imported and by which command
    model/          the tokenizer
    metrics.jsonl   rewards and lengths of each step, and the mismatch of sampler and trainer
    store/          the groups

Steps keep their numbers, so there may be gaps between them. An import that is given again goes on
where it was: what is on record is compared with the dump, and steps that are new are added.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from models import json_files
from rl_code.config.read_config import ConfigError
from rl_code.foreign import mismatch
from rl_code.foreign.dump import DumpError, Format
from rl_code.foreign.tokens import Encoder, group_of
from rl_code.host.files import write_atomically
from rl_code.metrics.progress import Progress
from rl_code.metrics.values import METRICS_FILE, json_line, read_metrics
from rl_code.run import origin, provenance
from rl_code.run.workdir import CONFIG_FILE, IMPORTED, STORE, imported
from rl_code.store import serialization
from rl_code.store import steps as steps_lib
from rl_code.store.compaction import Compaction
from rl_code.store.steps import Item
from rl_code.store.store import GroupStore
from rl_code.text.shell import command_line
from rl_code.types import Group

_NAME = "importer"
_SHARD_STEPS = 25


@dataclasses.dataclass(frozen=True)
class Settings:
    """Choices by which a dump becomes a record."""

    format: str
    settings: Mapping[str, Any]
    encoder: Encoder
    # The least reward of an episode that solved its task; None where nobody says.
    solved_from: float | None = None
    # True to leave ids of the dump alone.
    as_text: bool = False

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        return {
            IMPORTED: {
                "format": self.format,
                "settings": dict(self.settings),
                "tokenizer": self.encoder.name,
                "solved_from": self.solved_from,
                "as_text": self.as_text,
            }
        }


@dataclasses.dataclass
class Imported:
    """Result of an import."""

    steps: list[int]
    # What was passed over, in words; "" for nothing.
    left_out: str = ""
    # Steps that were not on record before.
    new: int = 0
    groups: int = 0
    episodes: int = 0
    tokens: int = 0
    sampled: int = 0
    # Tokens with log-probabilities of sampler and trainer.
    both: int = 0


def import_run(
    source: Format, paths: Sequence[Path], workdir: Path, settings: Settings
) -> Imported:
    """Reads a dump into a workdir. Raises DumpError, ConfigError and StoreError."""
    _check(workdir, settings)
    dump = source.find(paths)
    steps = sorted(dump.places)
    store = None
    found = Imported(steps, dump.left_out)
    rows = {row["step"]: row for row in read_metrics(workdir)}
    with Progress("imported", len(steps), compiles=False) as progress:
        for count, step in enumerate(steps, 1):
            groups = [
                group_of(dumped, number, settings.encoder, settings.solved_from, settings.as_text)
                for number, dumped in enumerate(source.read(step, dump.places[step]))
            ]
            if store is None:  # nothing is written for a dump that cannot be read
                _own(workdir, settings, source)
                store = GroupStore(workdir / STORE, _NAME)
            found.new += _put(store, step, groups)
            row = {"step": step} | numbers(groups)
            rows[step] = row
            _count(found, groups)
            progress.update(count, step=str(step), reward=row["reward/total"])
    if store is not None:
        Compaction(store.process, store.folder, _SHARD_STEPS).run(rest=True)
        write_atomically(
            workdir / METRICS_FILE, "".join(json_line(rows[step]) for step in sorted(rows)).encode()
        )
    return found


def _check(workdir: Path, settings: Settings) -> None:
    """Raises ConfigError for a workdir that is another's."""
    if (workdir / CONFIG_FILE).is_file():
        there, here = imported(workdir), settings.config()[IMPORTED]
        if there is None:
            raise ConfigError(f"{workdir} holds a run of ours; give another --workdir")
        if there != here:
            raise ConfigError(
                f"{workdir} was imported otherwise: {json.dumps(there)} there, "
                f"{json.dumps(here)} here; give another --workdir"
            )
    elif (workdir / STORE).exists():
        raise ConfigError(f"{workdir} has a {STORE} and no {CONFIG_FILE}; give another --workdir")


def _own(workdir: Path, settings: Settings, source: Format) -> None:
    """Makes a workdir that of an import."""
    workdir.mkdir(parents=True, exist_ok=True)
    _keep_tokenizer(workdir, settings.encoder)
    start = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command_line([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "imported from": settings.format,
        "its files lack": source.lacks,
        "tokens": _tokens_in_words(settings),
    }
    with open(workdir / provenance.STARTS_FILE, "a") as file:
        file.write(json.dumps(start) + "\n")
    # the last file, by which the workdir is one
    write_atomically(workdir / CONFIG_FILE, json.dumps(settings.config(), indent=1).encode())


def _tokens_in_words(settings: Settings) -> str:
    if settings.encoder.folder is None:
        return "bytes of the texts, not sampled tokens"
    if settings.as_text:
        return "texts tokenised at the import, not sampled tokens"
    return "those of the dump where it has ids; else texts tokenised at the import, not sampled"


def _keep_tokenizer(workdir: Path, encoder: Encoder) -> None:
    """Writes the folder by which texts are made of the record's tokens."""
    folder = workdir / origin.FOLDER
    if (folder / "config.json").is_file():
        return
    encoder.tokenizer.save(folder / "tokenizer.json")
    # no model: the record has none
    json_files.write_json(folder / "config.json", {IMPORTED: encoder.name})


def _put(store: GroupStore, step: int, groups: Sequence[Group]) -> bool:
    """Puts a step on record; False where it was there, and is the same. Raises DumpError where it
    is another one.
    """
    items = [
        Item(step, number, 0, len(group.trajectories), "train", None, number, ())
        for number, group in enumerate(groups)
    ]
    if store.is_consumed(step):
        digests = [_digest(group) for group in groups]
        if digests == store.consumption(step)["digests"]:
            return False
        raise DumpError(
            f"step {step} is another one now than when it was imported into {store.folder.parent}; "
            "give another --workdir"
        )
    # The store asks for steps without gaps; those of others may have some. A step whose folder is
    # there counts as begun.
    steps_lib.make_folder(store.folder, step)
    store.plan(items)
    left = {item.number for item in store.missing(step)}
    for item, group in zip(items, groups, strict=True):
        if item.number in left:
            store.deliver(item, group)
    store.consume(step, store.read(step), version=step)
    return True


def _digest(group: Group) -> str:
    """The digest that the record has of a group."""
    return hashlib.sha256(serialization.dumps(group)).hexdigest()


def numbers(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of a step: of what the dump says, and nothing else."""
    trajectories = [one for group in groups for one in group.trajectories]
    rewards = [[one.reward.total for one in group.trajectories] for group in groups]
    names = sorted({name for one in trajectories for name in one.reward.components})
    scores = sorted({name for one in trajectories for name in one.scores or ()})
    sampled = sum(int(one.sampled.sum()) for one in trajectories)

    def mean(values: Any) -> float:
        return float(np.mean([float(value) for value in values]))

    return {
        "reward/total": mean(one.reward.total for one in trajectories),
        **{
            f"reward/{name}": mean(
                one.reward.components[name] for one in trajectories if name in one.reward.components
            )
            for name in names
        },
        **{
            f"scores/{name}": mean(
                one.scores[name] for one in trajectories if one.scores and name in one.scores
            )
            for name in scores
        },
        "reward/signal_groups": mean(len(set(own)) > 1 for own in rewards),
        "episode/tokens": mean(one.num_tokens for one in trajectories),
        "episode/turns": mean(
            sum(turn.role == "assistant" for turn in one.turns) for one in trajectories
        ),
        **({"episode/sampled_tokens": sampled / len(trajectories)} if sampled else {}),
        **mismatch.of_groups(groups).numbers(),
    }


def _count(found: Imported, groups: Sequence[Group]) -> None:
    trajectories = [one for group in groups for one in group.trajectories]
    found.groups += len(groups)
    found.episodes += len(trajectories)
    found.tokens += sum(len(one.tokens) for one in trajectories)
    found.sampled += sum(int(one.sampled.sum()) for one in trajectories)
    found.both += len(mismatch.of_groups(groups).tokens)
