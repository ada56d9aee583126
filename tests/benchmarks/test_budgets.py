"""Jobs within a fixed time: whatever ends one, the lines that it has written stay."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from benchmarks.budgets import RESULTS, Job, Lines, read, run_all

ROOT = Path(__file__).resolve().parents[2]


def job(folder: Path, name: str, code: str, **settings) -> Job:
    """A job that runs code in which ``line`` writes."""
    begin = f"""
        import os, signal, sys, time
        from pathlib import Path
        sys.path.insert(0, {str(ROOT)!r})
        from benchmarks.budgets import Lines
        line = Lines(Path({str(folder / RESULTS)!r}), {name!r})
    """
    program = textwrap.dedent(begin) + textwrap.dedent(code)
    settings.setdefault("weight", 1.0)
    return Job(name, command=(sys.executable, "-c", program), **settings)


def ends(lines: list[dict]) -> dict[str, str]:
    return {x["job"]: x["ended"] for x in lines if "ended" in x}


def test_a_job_that_fails_or_is_killed_costs_no_other(tmp_path):
    told: list[str] = []
    jobs = [
        job(tmp_path, "fails", "line(at=1); sys.exit('no such device')"),
        job(tmp_path, "dies", "line(at=2); os.kill(os.getpid(), signal.SIGKILL)"),
        job(tmp_path, "works", "line(at=os.environ['GIVEN'])", environment={"GIVEN": "3"}),
    ]
    lines = run_all(jobs, tmp_path, 600.0, told=told.append)
    assert [(x["job"], x["at"]) for x in lines if "at" in x] == [
        ("fails", 1),
        ("dies", 2),
        ("works", "3"),
    ]
    assert ends(lines) == {"fails": "failed", "dies": "failed", "works": "done"}
    assert lines[1]["why"] == "exit code 1: no such device"
    assert lines == read(tmp_path / RESULTS)
    assert "  at 1" in told and any(text.startswith("works: done") for text in told)


class Clock:
    """A clock that a test sets: the first job's share is over once it has written its line."""

    def __init__(self, path: Path):
        self.path = path

    def __call__(self) -> float:
        return 1000.0 if self.path.exists() else 0.0


def test_a_job_is_cut_off_with_what_it_has_started(tmp_path):
    """The job writes a line and then sleeps for longer than any test; so does a child of it."""
    code = """
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        line(child=child.pid)
        time.sleep(3600)
    """
    jobs = [job(tmp_path, "long", code), job(tmp_path, "late", "", least_s=1.0)]
    lines = run_all(jobs, tmp_path, 100.0, told=lambda text: None, clock=Clock(tmp_path / RESULTS))
    assert ends(lines) == {"long": "cut off", "late": "no time"}
    # a killed child takes a moment to be gone; one that was not would sleep on
    while running(lines[0]["child"]):
        time.sleep(0.01)


def running(process: int) -> bool:
    """False for a process that is gone, or has ended and was not waited for."""
    try:
        state = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def test_time_that_a_job_leaves_goes_to_the_later_ones(tmp_path):
    """With a clock that stands still every share is what is left over the weights to come."""
    told: list[str] = []
    sizes = (("a", 3.0, 0.0), ("b", 1.0, 70.0), ("c", 3.0, 0.0), ("d", 1.0, 101.0))
    jobs = [job(tmp_path, name, "", weight=weight, least_s=least) for name, weight, least in sizes]
    run_all(jobs, tmp_path, 105.0, told=told.append, clock=lambda: 0.0)
    assert [text.split(": ")[1] for text in told if "done" not in text] == [
        "up to 38 s",
        # the least that it asks for
        "up to 70 s",
        "up to 75 s",
        "no time is left for it",
    ]


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    line = Lines(tmp_path / RESULTS, "a")
    line(value=1.5)
    with (tmp_path / RESULTS).open("a") as file:
        file.write('{"job": "a", "val')
    assert read(tmp_path / RESULTS) == [{"job": "a", "value": 1.5}]
    assert read(tmp_path / "none") == []


def test_whoever_is_interrupted_ends_the_job_that_runs(tmp_path):
    code = f"""
        import sys
        from pathlib import Path
        from benchmarks.budgets import Job, run_all
        program = '''
        import os, sys, time
        from pathlib import Path
        sys.path.insert(0, {str(ROOT)!r})
        from benchmarks.budgets import Lines
        Lines(Path({str(tmp_path / RESULTS)!r}), "a")(process=os.getpid())
        time.sleep(3600)
        '''
        jobs = [Job("a", 1.0, (sys.executable, "-c", program.replace("        ", "")))]
        run_all(jobs, Path({str(tmp_path)!r}), 3000.0, told=lambda text: print(text, flush=True))
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    # what the parent shows it shows while it watches the job
    shown = next(text for text in parent.stdout if text.startswith("  process"))
    parent.send_signal(signal.SIGINT)
    assert parent.wait() != 0
    assert not running(int(shown.split()[-1]))


def test_a_line_is_json_on_one_line(tmp_path):
    Lines(tmp_path / "x", "a")(text="two\nlines")
    (text,) = (tmp_path / "x").read_text().splitlines()
    assert json.loads(text) == {"job": "a", "text": "two\nlines"}
