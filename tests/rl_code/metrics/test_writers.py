"""Metrics of a run: what is written comes back, a resumed run leaves what an uninterrupted one
would, and services get the same numbers.
"""

from __future__ import annotations

import errno
import json
import math
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from configs import quickstart
from rl_code.config.read_config import ConfigError, build
from rl_code.metrics import writers as metric_writers
from rl_code.metrics.values import read_metrics
from rl_code.metrics.writers import JsonLines, MetricLog
from rl_code.run.config import RunConfig


def _events(workdir: Path) -> list[Event]:
    """Every TensorBoard record, files in the order in which TensorBoard reads them."""
    events = []
    for path in sorted((workdir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            events.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return events


def test_metrics_come_back_as_written(tmp_path):
    with MetricLog(tmp_path) as writer:
        writer.write(
            0, {"train/loss": np.float32(0.5), "train/steps": np.int32(3), "train/finite": True}
        )
        writer.write(2, {"train/loss": math.inf, "policy/kl": math.nan})
    first, second = read_metrics(tmp_path)
    assert first == {"step": 0, "train/loss": 0.5, "train/steps": 3, "train/finite": 1}
    assert second["train/loss"] == math.inf and math.isnan(second["policy/kl"])
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_each_row_is_on_disk_when_write_returns(tmp_path):
    writer = MetricLog(tmp_path)
    for step in range(3):
        writer.write(step, {"reward/total": step})
        assert [row["step"] for row in read_metrics(tmp_path)] == list(range(step + 1))
        assert _events(tmp_path)[-1].step == step


def test_resumed_metrics_equal_uninterrupted(tmp_path):
    def run(workdir, start, stop):
        with MetricLog(workdir, resume_step=start) as writer:
            for step in range(start, stop):
                writer.write(step, {"train/loss": 1 / (step + 1)})

    run(tmp_path / "whole", 0, 9)
    run(tmp_path / "killed", 0, 6)
    with open(tmp_path / "killed" / "metrics.jsonl", "a") as file:
        file.write('{"step":6,"train/lo')
    run(tmp_path / "killed", 4, 9)
    assert (tmp_path / "killed/metrics.jsonl").read_bytes() == (
        tmp_path / "whole/metrics.jsonl"
    ).read_bytes()


def test_tensorboard_hides_the_steps_that_are_repeated(tmp_path):
    for start, stop in ((0, 6), (4, 9)):
        with MetricLog(tmp_path, resume_step=start) as writer:
            for step in range(start, stop):
                writer.write(step, {"train/loss": start + step})
    shown: dict[int, float] = {}
    for event in _events(tmp_path):
        if event.HasField("session_log"):
            shown = {step: value for step, value in shown.items() if step < event.step}
        for value in event.summary.value:
            assert event.step not in shown
            shown[event.step] = value.simple_value
    assert shown == {
        **{step: step for step in range(4)},
        **{step: 4 + step for step in range(4, 9)},
    }


def test_damage_before_the_last_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step":0}\nrubbish\n{"step":2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2.*rubbish"):
        MetricLog(tmp_path, resume_step=3)


@pytest.mark.parametrize("value", [None, "high", np.zeros(2), [1.0]])
def test_a_metric_that_is_not_a_number_is_named(tmp_path, value):
    with MetricLog(tmp_path) as writer, pytest.raises(ValueError, match="train/loss"):
        writer.write(0, {"train/loss": value})


def test_a_step_is_written_once(tmp_path):
    with MetricLog(tmp_path) as writer:
        writer.write(3, {"a/b": 1})
        with pytest.raises(ValueError, match="step=3"):
            writer.write(3, {"a/b": 1})


def test_a_full_disk_is_named_and_leaves_whole_rows(tmp_path):
    writer = MetricLog(tmp_path)
    writer.write(0, {"a/b": 1})
    whole = writer._writers[0]._file

    class Full:
        """A file that takes some bytes of a row and then has no room."""

        room = 5

        def write(self, data):
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            written, self.room = whole.write(data[: self.room]), 0
            return written

        def __getattr__(self, name):
            return getattr(whole, name)

    writer._writers[0]._file = Full()
    with pytest.raises(OSError, match=r"disk is full.*metrics\.jsonl"):
        writer.write(1, {"a/b": 2})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step":0,"a/b":1}\n'


class FakeService:
    """Stands for the packages wandb and trackio, which have the same functions."""

    def __init__(self):
        self.started, self.rows, self.finished = [], [], 0

    def init(self, **settings):
        self.started.append(settings)
        return self

    def log(self, values, step):
        self.rows.append((step, values))

    def finish(self):
        self.finished += 1


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_service_gets_the_same_numbers_and_a_restart_goes_on_with_its_run(
    tmp_path, monkeypatch, name
):
    service = FakeService()
    monkeypatch.setitem(sys.modules, name, service)
    monkeypatch.setattr(metric_writers.importlib.util, "find_spec", lambda package: package)
    writer = metric_writers.WRITERS[name](project="p")
    for step in (0, 1):
        with MetricLog(tmp_path / "run", step, (JsonLines(), writer), {"seed": 3}) as log:
            log.write(step, {"a/b": np.float32(step + 0.5), "a/c": math.nan})
    assert [step for step, _ in service.rows] == [0, 1] and service.finished == 2
    assert service.rows[1][1]["a/b"] == 1.5 and math.isnan(service.rows[1][1]["a/c"])
    first, second = service.started
    assert first == second and first["resume"] == "allow"
    assert (first["project"], first["name"], first["config"]) == ("p", "run", {"seed": 3})
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [0, 1]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_service_that_is_not_installed_names_what_to_install(monkeypatch, name):
    monkeypatch.setattr(metric_writers.importlib.util, "find_spec", lambda package: None)
    settings = quickstart.get_config("smoke").to_dict() | {"metrics": {"writers": ("jsonl", name)}}
    with pytest.raises(
        ConfigError, match=rf"metrics\.writers\.1.*{name} is not installed; run pip .*\[{name}\]"
    ):
        build(RunConfig, settings)


def test_the_file_that_a_report_reads_cannot_be_left_out():
    settings = quickstart.get_config("smoke").to_dict() | {"metrics": {"writers": ("tensorboard",)}}
    with pytest.raises(ConfigError, match="'jsonl' must be among them"):
        build(RunConfig, settings)
