"""A real disk that fills up: a run goes on, on a copy of its workdir on a small file system.

The trainer runs in a mount namespace in which a tmpfs with little room lies at the place of the
workdir, so that the kernel itself refuses every write, of Python as of native code. When the
trainer has ended, what is on the small disk, half-written files too, takes the place of the
workdir.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

# Arguments: the workdir, an empty folder for the disk, a folder for the copy, the file that says
# that the copy is whole, KiB of room, and the command.
_SCRIPT = r"""
set -eu
run=$1 disk=$2 copy=$3 whole=$4 room=$5
shift 5
mount -t tmpfs -o size=90% none "$disk"
cp -a "$run/." "$disk/"
used=$(df --output=used -k "$disk" | tail -n 1)
mount -o remount,size=$((used + room))k "$disk"
mount --bind "$disk" "$run"
code=0
"$@" || code=$?
df -k "$disk"
cp -a "$disk/." "$copy/"
touch "$whole"
exit "$code"
"""

# Words in front of a command that is killed when the process that started it ends.
WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")


class SmallDiskError(RuntimeError):
    """No small disk can be made, or what was on it could not be copied."""


def namespace() -> list[str]:
    """Words in front of a command that may mount. Raises SmallDiskError where nobody may."""
    rights = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    words = ["unshare", "--mount", *rights]
    probe = [*words, "mount", "-t", "tmpfs", "none", "/tmp"]
    done = subprocess.run(probe, capture_output=True, text=True)
    if done.returncode:
        raise SmallDiskError(
            "a full disk needs a mount namespace, which this machine refuses "
            f"({done.stderr.strip()}); leave it out by --full_disks=0"
        )
    return words


def start(
    run: Path,
    command: Sequence[str],
    room_kib: int,
    log: IO[bytes],
    variables: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Disk:
    """Starts a command for which the workdir ``run`` is on a disk with so much room.

    variables: its environment; None for that of this process.
    """
    words = namespace()
    mend(run)
    folders = _beside(run)
    for name in ("disk", "copy"):
        folders[name].mkdir()
    paths = [str(run), *(str(folders[name]) for name in ("disk", "copy", "whole"))]
    script = ["bash", "-c", _SCRIPT, "small_disk", *paths, str(room_kib), *command]
    process = subprocess.Popen(
        [*words, *WITH_PARENT, *script],
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=variables,
        cwd=cwd,
    )
    return Disk(run, process)


class Disk:
    """A command that runs on a small disk."""

    def __init__(self, run: Path, process: subprocess.Popen[bytes]):
        self.process = process
        self._run = run

    def take_back(self) -> None:
        """Puts what is on the disk at the place of the workdir, once the command has ended. Raises
        SmallDiskError where that was not copied whole.
        """
        folders = _beside(self._run)
        if not folders["whole"].exists():
            raise SmallDiskError(
                f"the small disk of {self._run} was not made, or not copied; the run goes on from "
                "before it"
            )
        self._run.rename(folders["before"])
        folders["copy"].rename(self._run)
        mend(self._run)


def mend(run: Path) -> None:
    """Removes what a small disk left beside a workdir. If it was interrupted between two names, the
    workdir from before gets its name back.
    """
    folders = _beside(run)
    if not run.exists() and folders["before"].exists():
        folders["before"].rename(run)
    folders["whole"].unlink(missing_ok=True)
    for name in ("before", "copy", "disk"):
        shutil.rmtree(folders[name], ignore_errors=True)


def _beside(run: Path) -> dict[str, Path]:
    names = ("disk", "copy", "whole", "before")
    return {name: run.with_name(f"{run.name}.{name}") for name in names}
