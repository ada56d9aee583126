"""Facts about a run: the config, the commit, the hardware, and how two runs differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_code.run import lineage, provenance
from rl_code.run.workdir import CONFIG_FILE, STORE
from rl_code.store import steps as steps_lib
from rl_code.store import usage
from rl_code.store.errors import StoreError
from rl_code.store.reader import RecordReader


def names(runs: Sequence[Path]) -> list[str]:
    """A name for each run: its folder's, or as much of the path as tells the runs apart."""
    parts = [run.resolve().parts for run in runs]
    for count in range(1, max(map(len, parts)) + 1):
        found = ["/".join(of_run[-count:]) for of_run in parts]
        if len(set(found)) == len(found):
            return found
    raise ValueError(f"a run is compared with itself: {', '.join(map(str, runs))}")


def runs(folders: Sequence[Path], names: Sequence[str]) -> list[dict[str, Any]]:
    """Facts about each run as (what, value), of its last start, and how many starts."""
    found = []
    for folder, name in zip(folders, names, strict=True):
        starts = provenance.read(folder)
        forks = [fact for fork in lineage.read(folder) for fact in fork.facts()]
        facts = forks + (list(starts[-1].items()) if starts else []) + record(folder / STORE)
        found.append({"name": name, "facts": facts, "starts": len(starts)})
    return found


def record(store: Path) -> list[tuple[str, str]]:
    """Disk usage of the record of a run, as (what, value); empty where there is none."""
    if not steps_lib.exists(store):
        return []
    try:
        reader = RecordReader(store)
        found = usage.measure(store)
        kept = reader.steps()
        removed = reader.removed()
    except StoreError as error:
        return [("record", f"cannot be read: {error}")]
    facts = [
        f"{found.bytes / 1e6:.1f} MB for {found.tokens / 1e6:.2f} million tokens "
        f"({found.mb_per_mtokens:.1f} MB per million), {found.files} files "
        f"({found.files_per_100_steps:.0f} per 100 steps)",
        *([f"steps {kept[0]} to {kept[-1]}"] if kept else []),
        *([str(removed)] if removed else []),
    ]
    return [("record", "; ".join(facts))]


def config_table(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Rows of the configs: key, value of each run, whether they differ; differing keys first."""
    flat = [_flat(_config(folder)) for folder in folders]
    keys = dict.fromkeys(key for of_run in flat for key in of_run)
    rows = []
    for key in keys:
        values = [json.dumps(of_run[key]) if key in of_run else "" for of_run in flat]
        rows.append({"key": key, "values": values, "differs": len(set(values)) > 1})
    return sorted(rows, key=lambda row: not row["differs"])


def _config(folder: Path) -> dict[str, Any]:
    """The config that a workdir belongs to; empty where there is none yet."""
    path = folder / CONFIG_FILE
    return json.loads(path.read_text()) if path.exists() else {}


def _flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value; lists are values."""
    if not isinstance(config, dict) or (prefix and not config):
        return {prefix: config}
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= _flat(value, f"{prefix}.{key}" if prefix else key)
    return found
