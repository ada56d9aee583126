"""What launch.cluster submits, on a real SLURM: a pre-empted run comes back and ends as one that was
not, and a sweep shows the member that failed.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest

from cluster.render import Job, render
from rl_code.metrics.values import read_metrics
from rl_code.run.workdir import STORE
from rl_code.store.store import GroupStore
from tests import programs
from tests import slurm as slurm_lib
from tests.rl_code.repeatable import repeatable
from tests.slurm import TRAINING_S, Slurm

STEPS = 4
FLAGS = (
    f"--config.train.steps={STEPS}",
    "--config.sft.steps=2",
    "--config.checkpoint.every=100",
    "--config.asynchrony.mode=sync",
)
# The run that is pre-empted, once more and left alone; and a run whose model is not there.
SWEPT = """
from configs import faults
def get_config(arg=""):
    return faults.get_config("smoke")
def get_sweep(arg=""):
    return [{"variant": "good", "seed": 0}, {"variant": "bad", "model.weights": "/nowhere"}]
"""


@pytest.fixture
def slurm():
    if why := slurm_lib.missing():
        pytest.skip(why)
    with slurm_lib.slurm() as found:
        yield found


def submit(slurm: Slurm, workdir: Path, *flags: str) -> list[str]:
    """The numbers of the jobs that launch.cluster submits."""
    line = ["--engine=slurm", f"--workdir={workdir}", *flags]
    done = programs.run("launch.cluster", *line, env=slurm.environment, devices=1)
    assert done.returncode == 0, done.stderr
    return re.findall(r"^\d+$", done.stdout, re.MULTILINE)


def log(workdir: Path) -> str:
    return "\n".join(path.read_text() for path in (workdir / "cluster" / "logs").glob("*.log"))


def signal_run(workdir: Path, number: signal.Signals) -> None:
    """Sends a signal to the process that trains in a workdir."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"launch.train" in words and f"--workdir={workdir}".encode() in words:
                if Path(words[0].decode()).name.startswith("python"):
                    os.kill(int(path.parent.name), number)


@pytest.mark.slow(reason="trains for two minutes of processor time")
@pytest.mark.timeout(4 * TRAINING_S)
def test_a_preempted_run_comes_back_and_a_sweep_shows_what_failed(slurm, tmp_path):
    stopped, swept = tmp_path / "stopped", tmp_path / "swept"
    tmp_path.joinpath("swept.py").write_text(SWEPT)
    line = (f"--config={tmp_path / 'swept.py'}", *FLAGS)
    (job,) = submit(slurm, stopped, *line, "--role=all", "--sbatch=--exclusive")
    slurm.wait(
        "a step",
        lambda: read_metrics(stopped) or slurm.job(job)["JobState"] == "FAILED",
        TRAINING_S,
    )
    signal_run(stopped, signal.SIGSTOP)  # it does not finish before SLURM gets to it
    urgent = slurm.run(
        *("sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive"),
        *(f"--output={tmp_path}/urgent.log", "--wrap=true"),
    )
    slurm.wait("pre-emption", lambda: slurm.job(job)["JobState"] != "RUNNING")
    signal_run(stopped, signal.SIGCONT)
    slurm.wait_for_end(urgent, TRAINING_S)
    assert 0 < len(read_metrics(stopped)) < STEPS, log(stopped)
    assert "stopped after step" in log(stopped) and "asked to stop" in log(stopped)

    # until it may come back there is time for a sweep, one of whose runs it has to equal
    array, table = submit(slurm, swept, *line, "--role=sweep", "--retries=0")
    ended = slurm.wait_for_end(job, TRAINING_S)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), log(stopped)
    states = [slurm.wait_for_end(f"{array}_{task}", TRAINING_S) for task in range(2)]
    codes = [(state["JobState"], state["ExitCode"]) for state in states]
    assert codes == [("COMPLETED", "0:0"), ("FAILED", "2:0")], log(swept)
    runs = stopped, swept / "variant=good,seed=0"
    rows = [list(map(repeatable, read_metrics(run))) for run in runs]
    assert [row["step"] for row in rows[0]] == list(range(STEPS))
    assert rows[0] == rows[1]
    ends = [
        [GroupStore(run / STORE).consumption(step)["weights"] for step in range(STEPS)]
        for run in runs
    ]
    assert ends[0] == ends[1] and len(set(ends[0])) > 1

    assert slurm.wait_for_end(table)["ExitCode"] == "1:0", log(swept)
    finished, missing = (swept / "sweep.txt").read_text().split("not finished")
    assert "good" in finished and "bad" not in finished
    assert "bad" in missing and "failed with exit code 2" in missing


# Stands in for Python: notes its words, fails when an actor starts for the first time, and obeys
# SIGTERM with exit code 130.
STAND_IN = """#!/usr/bin/env bash
cd "$(dirname "$0")"
echo "$*" >>calls
trap 'exit 130' TERM
case $* in *--role=actor*)
    if [ ! -e failed ]; then touch failed; exit 1; fi
    ;;
esac
while [ ! -e done ]; do sleep 0.05; done
"""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_who_asks_a_job_to_stop_decides_whether_it_comes_back(slurm, tmp_path):
    python = tmp_path / "python.sh"
    python.write_text(STAND_IN)
    python.chmod(0o755)

    def calls(role: str) -> int:
        path = tmp_path / "calls"
        return path.read_text().count(f"--role={role}") if path.exists() else 0

    def render_and_submit(name: str, **values) -> tuple[str, Path]:
        workdir = tmp_path / name
        folder = workdir / "cluster"
        folder.mkdir(parents=True)
        job = Job(
            "slurm",
            name=name,
            arguments=[f"--workdir={workdir}"],
            workdir=str(workdir),
            repository=str(programs.ROOT),
            python=str(python),
            **values,
        )
        for file, text in render(job).items():
            (folder / file).write_text(text)
        return slurm.run("bash", folder / "submit.sh"), workdir

    # as before the time limit: only the processes are asked to stop, and the job comes back
    job, workdir = render_and_submit("alone", role="all")
    slurm.wait("the run", lambda: calls("all") == 1)
    slurm.run("scancel", "--signal=TERM", job)
    slurm.wait("its end", lambda: "exit code 130" in log(workdir))
    # an actor that fails is started again beside its learner
    both, _ = render_and_submit("both", role="learner_and_actors")
    slurm.wait("an actor's second start", lambda: (calls("learner"), calls("actor")) == (1, 2))
    # actors that join; one of them is let go
    array, _ = render_and_submit("more", role="actors", actors=2, first_actor=1)
    tasks = [f"{array}_{task}" for task in (1, 2)]
    slurm.wait("two further actors", lambda: calls("actor") == 4)
    slurm.run("scancel", tasks[0])
    ended = slurm.wait_for_end(tasks[0])
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0")
    slurm.wait("the run again", lambda: calls("all") == 2)
    (tmp_path / "done").touch()
    for left in (job, both, tasks[1]):
        assert slurm.wait_for_end(left)["JobState"] == "COMPLETED", log(workdir)
    assert slurm.job(job)["Restarts"] == "1"
    assert calls("actor") == 4
