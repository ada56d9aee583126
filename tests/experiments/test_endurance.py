"""A long run is struck as planned and goes on; its audit finds what is lost and what grows."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from configs import ten_thousand
from experiments.endurance import dying, play, report, small_disk
from experiments.endurance import plan as plan_lib
from experiments.endurance.plan import FULL_DISK, KILL
from experiments.endurance.play import EnduranceError, Player, steps_done
from rl_code.config import read_config
from rl_code.config.read_config import ConfigError
from rl_code.evaluation.suite import SuiteResult, TaskResult
from rl_code.run.config import RunConfig
from rl_code.store.audit import Report
from tests import programs

# Stands in for the trainer: a row of metrics and a file of 4 KiB for each step, from where it was.
TRAINER = """
import json, pathlib, signal, sys, time
run, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
run.mkdir(exist_ok=True)
path = run / "metrics.jsonl"
kept = [x for x in path.read_text().split("\\n")[:-1]] if path.exists() else []
path.write_text("".join(x + "\\n" for x in kept))
try:
    for step in range(len(kept), steps):
        (run / str(step)).write_bytes(b"x" * 4096)
        with open(path, "a") as file:
            file.write(json.dumps({"step": step}) + "\\n")
        time.sleep(0.02)
except OSError as error:
    print("the disk is full" if error.errno == 28 else error)
    sys.exit(1)
"""


def player(folder: Path, plan: plan_lib.Plan, steps: int, trainer: str = TRAINER) -> Player:
    command = [sys.executable, "-c", trainer, str(folder / "run"), str(steps)]
    plan.save(folder)
    return Player(folder, plan, command, {}, 64, lambda words: None)


def has_namespaces() -> bool:
    try:
        small_disk.namespace()
    except small_disk.SmallDiskError:
        return False
    return True


def test_faults_are_spread_over_the_run_but_for_its_quiet_stretches():
    plan = plan_lib.make(1000, 200, 1, 150, 5.0, seed=1)
    steps = [fault.step for fault in plan.faults]
    assert plan.quiet == [(400, 550), (850, 1000)] and steps == sorted(steps)
    assert not any(first <= step < last for step in steps for first, last in plan.quiet)
    assert collections.Counter(fault.what for fault in plan.faults) == {KILL: 200, FULL_DISK: 1}
    assert all(0 <= fault.delay_s <= 5.0 for fault in plan.faults)
    # about as many before the first stretch as its share of the open steps
    assert 80 < sum(step < 400 for step in steps) < 130
    assert plan_lib.make(1000, 200, 1, 150, 5.0, seed=1) == plan
    assert plan_lib.make(1000, 200, 1, 150, 5.0, seed=2) != plan


def test_a_plan_is_kept_and_another_one_is_refused(tmp_path):
    assert plan_lib.load(tmp_path) is None
    plan = plan_lib.make(100, 3, 1, 10, 1.0, seed=0)
    plan.faults[0].done = {"step": 4}
    plan.save(tmp_path)
    assert plan_lib.load(tmp_path) == plan and plan.next is plan.faults[1]
    plan_lib.check(plan, 100, 3, 1)
    with pytest.raises(ConfigError, match=r"--kills=4 .*for 100 steps, 3 kills and 1 full disks"):
        plan_lib.check(plan, 100, 4, 1)
    with pytest.raises(ConfigError, match="--quiet=60: two stretches leave no step of 60"):
        plan_lib.make(60, 1, 0, 60, 1.0, seed=0)


@pytest.mark.skipif(not has_namespaces(), reason="no mount namespaces here")
def test_a_struck_run_comes_to_its_end(tmp_path):
    plan = plan_lib.make(80, 3, 1, 5, 0.05, seed=3)
    player(tmp_path, plan, 80).play()
    run = tmp_path / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(80)) and steps_done(run) == 80
    assert {path.name for path in run.iterdir()} == {"metrics.jsonl", *map(str, range(80))}
    done = [fault.done for fault in plan_lib.load(tmp_path).faults]
    assert None not in done
    (disk,) = (one for one in done if "told" in one)
    assert disk["code"] == 1 and "the disk is full" in disk["told"] and disk["steps"] > 0
    lives = [json.loads(line) for line in (tmp_path / "lives.jsonl").read_text().splitlines()]
    ends = collections.Counter(life["how"] for life in lives)
    assert ends == {"killed": 3, "stopped for a full disk": 1, "ended with code 0": 1}
    left = {path.name for path in tmp_path.iterdir()}
    assert not left & {"run.disk", "run.copy", "run.whole", "run.before"}


@pytest.mark.skipif(not has_namespaces(), reason="no mount namespaces here")
def test_a_disk_that_was_interrupted_leaves_the_workdir_as_it_was(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "a").write_text("old")
    with open(tmp_path / "log", "wb") as log:
        line = ["bash", "-c", f"echo new > {run}/a; echo more > {run}/b"]
        disk = small_disk.start(run, line, 64, log)
        assert disk.process.wait() == 0
    assert (run / "a").read_text() == "old"  # until it is taken back
    run.rename(tmp_path / "run.before")  # a kill between two names
    small_disk.mend(run)
    assert (run / "a").read_text() == "old" and [x.name for x in run.iterdir()] == ["a"]
    with pytest.raises(small_disk.SmallDiskError, match="was not made, or not copied"):
        disk.take_back()
    assert (run / "a").read_text() == "old"


def test_a_trainer_that_gives_up_or_fails_again_and_again_ends_the_run(tmp_path):
    plan = plan_lib.make(80, 0, 0, 0, 0.0, seed=0)
    with pytest.raises(EnduranceError, match="the trainer gave up: bad config"):
        player(tmp_path, plan, 80, "import sys; print('bad config'); sys.exit(2)").play()
    with pytest.raises(EnduranceError, match="5 starts in a row failed: broken"):
        player(tmp_path, plan, 80, "import sys; print('broken'); sys.exit(1)").play()


def test_a_trainer_without_progress_is_killed_and_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(play, "_HUNG_S", 0.5)
    kill_all = play.kill_all

    def killed(pid: int) -> None:
        kill_all(pid)
        # the next one may take as long to start as this machine needs
        monkeypatch.setattr(play, "_HUNG_S", 600.0)

    monkeypatch.setattr(play, "kill_all", killed)
    hangs_once = (
        "import time, pathlib, sys; p = pathlib.Path(sys.argv[1] + '.once')\n"
        "if not p.exists(): p.touch(); time.sleep(60)"
    )
    player(tmp_path, plan_lib.make(80, 0, 0, 0, 0.0, seed=0), 80, hangs_once).play()
    lives = [json.loads(line) for line in (tmp_path / "lives.jsonl").read_text().splitlines()]
    assert [life["how"] for life in lives] == ["hung", "ended with code 0"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a\nmetrics.jsonl: the disk\nis full; make room", "a metrics.jsonl: the disk is full; make room"),
        ("OSError: [Errno 28] No space left on device", "OSError: [Errno 28] No space left on device"),
        ("ended well", ""),
    ],
)  # fmt: skip
def test_words_of_a_full_disk_are_found_across_lines(text, told):
    assert play.of_full_disk(text) == told


def test_a_stopped_run_goes_on(tmp_path, monkeypatch):
    plan = plan_lib.make(30, 0, 0, 0, 0.0, seed=0)
    one = player(tmp_path, plan, 30)
    looked = []

    def interrupted(run: Path) -> int:
        looked.append(steps_done(run))
        if looked[-1] >= 3:
            patch.undo()
            raise KeyboardInterrupt
        return looked[-1]

    with monkeypatch.context() as patch:
        patch.setattr(play, "steps_done", interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.play()
    assert steps_done(tmp_path / "run") < 30
    player(tmp_path, plan_lib.load(tmp_path), 30).play()
    assert steps_done(tmp_path / "run") == 30 and plan_lib.load(tmp_path).lives == 2


# Plays a plan with TRAINER in a process of its own. Arguments: folder, trainer, full disks.
PLAYER = """
import sys, pathlib
from experiments.endurance import plan, play
folder, trainer, disks = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
faults = plan.make(10**6, 0, disks, 0, 0.0, 0)
for fault in faults.faults:
    fault.step = 3
command = [sys.executable, "-c", trainer, str(folder / "run"), "1000000"]
play.Player(folder, faults, command, {}, 10**6, lambda words: None).play()
"""


def names_of(processes: list[psutil.Process]) -> set[str]:
    """Programs of those processes that have not ended, without their versions."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.add(process.name().rstrip(".0123456789"))
    return found


@pytest.mark.parametrize(
    "on_small_disk",
    [False, pytest.param(True, marks=pytest.mark.skipif(not has_namespaces(), reason="as above"))],
)
def test_a_killed_player_leaves_no_trainer_behind(tmp_path, on_small_disk):
    words = [sys.executable, "-c", PLAYER, str(tmp_path), TRAINER, str(int(on_small_disk))]
    process = subprocess.Popen(words, cwd=programs.ROOT)
    seen = tmp_path / "full_disk.log" if on_small_disk else tmp_path / "run" / "metrics.jsonl"
    names = {"bash", "python"} if on_small_disk else {"python"}
    player_seen = psutil.Process(process.pid)
    below: list[psutil.Process] = []
    while not (seen.exists() and names <= names_of(below)):
        assert process.poll() is None
        below = player_seen.children(recursive=True)
        time.sleep(0.01)
    process.kill()
    process.wait()
    _, left = psutil.wait_procs(below, timeout=60)
    for one in left:
        one.kill()
    assert left == []


def test_slopes_are_those_of_whole_processes_in_quiet_stretches():
    def grown(life: int, begin: int, end: int, slope: float):
        return [
            {"life": life, "step": s, "mb": 500 + slope * s / 1000} for s in range(begin, end, 10)
        ]

    memory = grown(1, 0, 1000, 50.0) + grown(2, 1000, 2500, 0.5) + grown(3, 2500, 2700, 9.0)
    (found,) = report.slopes(memory, [(1000, 3000)])
    assert found["life"] == 2 and (found["first"], found["last"]) == (1100, 2490)
    assert np.isclose(found["mb"], 0.5)
    assert report.slopes(memory, []) == []
    # the first look of each after five updates
    assert np.isclose(report.young(memory), np.polyfit([10, 1010, 2510], [500.5, 500.505, 522.59], 1)[0] * 1000)  # fmt: skip
    assert report.young(memory[:20]) is None


def test_counts_of_sandboxes_are_added_over_processes_also_with_one_id_twice(tmp_path):
    path = tmp_path / "sandboxes.jsonl"
    assert dying.totals(path) == (0, 0)
    lines = [(7, 64, 3), (7, 128, 5), (9, 64, 4), (7, 64, 2)]
    rows = [json.dumps({"pid": p, "opened": o, "killed": k}) for p, o, k in lines]
    path.write_text("\n".join([*rows, '{"pid": 7, "ope']))
    assert dying.totals(path) == (128 + 64 + 64, 5 + 4 + 2)


def found_by(steps: int, plan: plan_lib.Plan, **changes) -> dict:
    audit = dataclasses.asdict(Report(steps=steps, consumed=steps, groups=4 * steps))
    whole = {
        "steps": steps,
        "groups_per_step": 4,
        "audit": audit,
        "metrics": {"rows": steps, "missing": 0, "repeated": 0},
        "not_finite": [],
        "ends": {},
        "full_disks": [{"code": 1, "told": "the disk is full"}],
        "memory": [{"first": 0, "last": 9, "mb": 0.2}],
    }
    return whole | changes


def test_the_audit_finds_what_is_not_as_it_must_be():
    plan = plan_lib.make(100, 1, 1, 10, 1.0, seed=0)
    for fault in plan.faults:
        fault.done = {"step": 1}
    assert report.problems(found_by(100, plan), plan, 1.0) == []
    audit = found_by(100, plan)["audit"]
    for changes, words in (
        ({"audit": audit | {"problems": ["item lost"]}}, "item lost"),
        ({"audit": audit | {"consumed": 99}}, "99 steps were consumed, not 100"),
        ({"audit": audit | {"groups": 399}}, "399 groups in 100 steps of 4"),
        ({"metrics": {"rows": 100, "missing": 1, "repeated": 1}}, "metrics of the steps"),
        ({"ends": {"hung": 2}}, "2 processes hung"),
        ({"not_finite": [3]}, "not finite in steps [3]"),
        ({"full_disks": [{"code": 0, "told": ""}]}, "did not end the trainer"),
        ({"memory": []}, "no stretch without kills was long enough"),
        ({"memory": [{"first": 0, "last": 9, "mb": 1.5}]}, "grew by 1.50 MB"),
    ):
        told = report.problems(found_by(100, plan, **changes), plan, 1.0)
        assert told and words in told[0]
    plan.faults[0].done = None
    assert "0 of 1 faults" in report.problems(found_by(100, plan), plan, 1.0)[0]


def test_parts_of_a_run_are_means_and_maxima():
    rows = [{"step": s, "a/mean": float(s // 10), "a/x_max": float(s)} for s in range(100)]
    assert report.parts(rows, "a/mean") == list(range(10))
    assert report.parts(rows, "a/x_max") == [9 + 10 * part for part in range(10)]
    assert report.parts(rows, "a/none") == []
    assert report.steps_of([*rows[:50], *rows[49:60], *rows[70:]]) == {
        "rows": 91,
        "missing": 10,
        "repeated": 1,
    }


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_short_run_survives_a_kill_dying_sandboxes_and_a_full_disk(tmp_path):
    # compiled programs, which the runs of this machine share
    (tmp_path / "compiled").symlink_to(os.environ["JAX_COMPILATION_CACHE_DIR"])
    done = programs.run(
        "experiments.endurance",
        "--config=configs/ten_thousand.py:smoke",
        f"--workdir={tmp_path}",
        "--config.model.preset=tests.models.small:NARROW",
        "--config.sft=None",
        # one block of a view: each of each layer is a condition that is compiled
        "--config.rollout.engine.view_block=288",
        *("--kills=1", f"--full_disks={int(has_namespaces())}", "--sandbox_deaths=0.2"),
        # a kill at update 5; the disk is full from update 3 on, so that a checkpoint, which has
        # 400 KiB, is due on it however late it comes
        *("--quiet=0", "--delay_s=0.2", "--room_kib=200", "--strike_seed=299"),
        devices=None,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("every check passed\n") and (tmp_path / "score.png").exists()
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["audit"]["consumed"] == 12 and found["audit"]["groups"] == 48
    assert found["audit"]["staleness_max"] == 1 and found["faults"][KILL] == 1
    assert [step for step, *_ in found["scores"]["held_out"]] == [0, 4, 8, 12]


def test_a_run_in_progress_has_tables_and_a_figure(tmp_path):
    run = tmp_path / "run"
    config = read_config.build(RunConfig, ten_thousand.get_config())
    plan = plan_lib.make(10_000, 2, 1, 1500, 1.0, seed=0)
    plan.faults[0].done = {"step": 3}
    # before the first update, and in the middle
    nothing = report.measure(tmp_path, config, plan, (0, 0))
    report.draw(nothing, plan, tmp_path / "none.png")
    assert report.tables(nothing) and nothing["memory"] == []
    run.mkdir()
    row = {"train/finite": 1.0, "time/step_s": 0.5, "episode/rebuilt": 2.0, "episode/faults": 0.0}
    row |= dict.fromkeys(report.MISMATCH, 1e-4)
    lines = [json.dumps({"step": step} | row) for step in range(40)]
    (run / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    for step, right in ((0, 1), (500, 3)):
        tasks = tuple(
            TaskResult(str(at), 4, right, None, 0, 9.0, 0, calls=1, mean_seconds=0.1, cheats=0)
            for at in range(3)
        )
        SuiteResult("held_out", f"step_{step}", step, {}, tasks).save(run)
    memory = [{"life": 1, "step": s, "mb": 500.0} for s in range(3800, 4600, 20)]
    (tmp_path / "memory.jsonl").write_text("\n".join(map(json.dumps, memory)))
    found = report.measure(tmp_path, config, plan, (100, 5))
    report.draw(found, plan, tmp_path / "score.png")
    assert [step for step, *_ in found["scores"]["held_out"]] == [0, 500]
    assert found["scores"]["held_out"][1][1] == 0.75 and found["rebuilt"] == 80.0
    assert found["metrics"] == {"rows": 40, "missing": 0, "repeated": 0}
    assert abs(found["memory"][0]["mb"]) < 1e-6 and (tmp_path / "score.png").stat().st_size > 0
    assert "0 steps were consumed, not 10000" in report.problems(found, plan, 1.0)
