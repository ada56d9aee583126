"""What is written to cgroups of both versions, and how their counts of CPU time are read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rl_code.environment.sandbox import cgroups
from rl_code.environment.sandbox.inside.meter import Meter

LIMITS = {"memory": 1 << 20, "pids": 9, "cpu": 50_000}
WRITTEN = {
    1: {
        "memory.limit_in_bytes": "1048576",
        "pids.max": "9",
        "cpu.cfs_period_us": "100000",
        "cpu.cfs_quota_us": "50000",
        "cpuacct.usage": "0",
    },
    2: {"memory.max": "1048576", "pids.max": "9", "cpu.max": "50000 100000"},
}


def enclose(monkeypatch, folder: Path, version: int) -> tuple[cgroups.Cgroups, Path]:
    """This process in a cgroup that is a plain folder."""
    names = ("memory", "pids", "cpu", *(["cpuacct"] if version == 1 else []))
    monkeypatch.setattr(cgroups, "parents", lambda: {name: (folder, version) for name in names})
    made = cgroups.Cgroups(LIMITS)
    (inner,) = made.enclose(os.getpid())
    return made, inner


@pytest.mark.parametrize("version", [1, 2])
def test_every_limit_is_written_and_the_process_enters_last(monkeypatch, tmp_path, version):
    _, folder = enclose(monkeypatch, tmp_path, version)
    found = {path.name: path.read_text() for path in folder.iterdir()}
    assert found == {**WRITTEN[version], "cgroup.procs": str(os.getpid())}


def test_the_count_of_either_version_is_found_and_read(monkeypatch, tmp_path):
    limits = {"cpu_s": 5, "watched_mb": 0, "watched_processes": 0}
    for version, name, before, after in (
        (1, "cpuacct.usage", "1500000000\n", "4000000000\n"),
        (2, "cpu.stat", "usage_usec 1500000\nuser_usec 1\n", "usage_usec 4000000\nuser_usec 1\n"),
    ):
        parent = tmp_path / str(version)
        parent.mkdir()
        made, folder = enclose(monkeypatch, parent, version)
        if version == 2:
            assert made.meter([folder]) is None
        (folder / name).write_text(before)
        assert made.meter([folder]) == folder / name
        with open(folder / name, "rb") as file:
            meter = Meter({**limits, "meter": file.fileno()})
            (folder / name).write_text(after)
            assert meter.cpu_s() == pytest.approx(2.5) and not meter.exceeded()
            (folder / name).write_text(after.replace("4", "7"))
            assert meter.exceeded() == "cpu"


def test_the_count_of_version_1_is_not_taken_for_that_of_version_2(monkeypatch, tmp_path):
    made, folder = enclose(monkeypatch, tmp_path, 1)
    (folder / "cpuacct.usage").unlink()
    (folder / "cpu.stat").write_text("nr_periods 0\nnr_throttled 0\nthrottled_time 0\n")
    assert made.meter([folder]) is None
