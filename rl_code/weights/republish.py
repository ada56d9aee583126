"""Requests of actors for stored versions that cannot be read.

A checksum finds a flipped bit on storage. Then no version can be read by a route that uses the
damaged file. The actor that notices it writes a request. The learner has the bits of the newest
version in memory, and answers within seconds, even while it waits for groups: it stores the version
once more, in full (``StoredPublisher``).

    weights/unreadable/v_00000012.json      the request, deleted once it is answered
    weights/.v_00000012.<id>                the version while its parts are written

Only one request for a version exists at a time: whoever comes second finds it and waits for the
same answer. A request is never changed, so all processes of the learner see the same one, and each
answers it once. The first process of the learner deletes it.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from rl_code.host import files
from rl_code.weights.version_records import encode, number_of, read_json, record_path
from rl_code.weights.versions import WeightError
from rl_code.weights.waiting import Deadline

UNREADABLE = "unreadable"


def ask(folder: Path, number: int, who: str, why: str, deadline: Deadline) -> bool:
    """Asks the learner to publish a version once more, unless somebody already has, and waits for
    the answer. Returns False if there was none in time.

    Raises OSError.
    """
    path = folder / UNREADABLE / record_path(folder, number).name
    path.parent.mkdir(exist_ok=True)
    content = {"id": secrets.token_hex(8), "who": who, "why": why}
    aside = path.with_name(f".{path.name}.{content['id']}{files.PARTIAL}")
    with files.explain_full_disk(path):
        files.write_once(path, encode(content), aside)
    # By listing: a client of NFS may remember for long that a file was there.
    return deadline.wait(lambda: path.name not in os.listdir(path.parent))


def pending(folder: Path) -> dict[int, tuple[Path, dict[str, Any] | None]]:
    """File and content of the request for each version; content None if it cannot be read.

    Raises OSError.
    """
    there = folder / UNREADABLE
    found: dict[int, tuple[Path, dict[str, Any] | None]] = {}
    for name in os.listdir(there) if there.is_dir() else []:
        if (number := number_of(name)) is not None:
            try:
                found[number] = there / name, read_json(there / name)
            except WeightError:  # damaged, or answered just now
                found[number] = there / name, None
    return found
