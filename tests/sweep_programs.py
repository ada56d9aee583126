"""The command launch.sweep in a process of its own, with small programs in the place of those that
train and fork.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests import programs

ROOT = Path(__file__).resolve().parents[1]
# Stands in for the trainer. It writes its arguments into calls.txt of the workdir and obeys SIGTERM
# with exit code 130. Beside the workdir, a file "slow" makes it wait to be stopped and a file "broken"
# makes the runs whose folder is named after rloo end with the exit code that the file holds.
TRAINER = """
import pathlib, signal, sys, time
workdir = pathlib.Path(dict(a.lstrip("-").split("=", 1) for a in sys.argv[1:])["workdir"])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
with open(workdir / "calls.txt", "a") as file:
    file.write(" ".join(sys.argv[1:]) + chr(10))
if (workdir.parent / "slow").exists():
    time.sleep(3600)
broken = workdir.parent / "broken"
sys.exit(int(broken.read_text()) if "rloo" in workdir.name and broken.exists() else 0)
"""
_COMMAND = """
import sys
from launch import sweep, flags
from rl_code.run.config import RunConfig
from sweeps import fork
fork.FORK = (sys.executable, "-c", sys.argv.pop(1))
sweep.TRAIN = (sys.executable, "-c", sys.argv.pop(1))
flags.run(sweep.main, kind=RunConfig, expected=(sweep.SweepError,), lasting=(sweep.WrongRuns,))
"""
_SWEPT = """
from configs import quickstart
def get_config(arg=""):
    return quickstart.get_config("smoke")
def get_sweep(arg=""):
    return [{"variant": variant, "seed": 1} for variant in VARIANTS]
"""


def start(
    folder: Path, variants: Sequence[str], *arguments: str, forker: str = ""
) -> subprocess.Popen[str]:
    """A sweep of the quickstart's smoke config in ``folder``, one run for each variant, whose
    folders are ``variant=<name>,seed=1``.

    forker: the program in the place of launch.fork.
    """
    (folder / "swept.py").write_text(_SWEPT.replace("VARIANTS", repr(tuple(variants))))
    line = [f"--config={folder / 'swept.py'}", f"--workdir={folder}", *arguments]
    return programs.start("-c", _COMMAND, forker, TRAINER, *line, stderr=subprocess.PIPE)


def run(
    folder: Path, variants: Sequence[str], *arguments: str, forker: str = ""
) -> subprocess.CompletedProcess[str]:
    """As ``start``, to its end."""
    process = start(folder, variants, *arguments, forker=forker)
    output, error = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, output, error)
