"""The files of a run: what is written comes back, a resumed run leaves what an uninterrupted one
would.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import math
import struct
import sys
import threading
import types as types_lib
from pathlib import Path

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

import rl_code.host.files
from configs import quickstart
from models.tokenizer import Tokenizer
from rl_code import types
from rl_code.config.read_config import ConfigError, build
from rl_code.environment.protocols.compact import Compact
from rl_code.metrics import progress as progress_lib
from rl_code.metrics import writers as metric_writers
from rl_code.metrics.progress import Progress
from rl_code.metrics.values import read_metrics
from rl_code.metrics.writers import JsonLines, MetricLog
from rl_code.run import origin
from rl_code.run.config import RunConfig
from rl_code.run.journal import Journal
from rl_code.run.step_metrics import episode_metrics, has_signal, taught
from rl_code.run.trajectory_log import (
    Words,
    evaluation_names,
    read_evaluation,
    read_trajectories,
    trajectory_steps,
    words_of,
    write_evaluation,
)
from rl_code.run.workdir import STORE
from rl_code.store.errors import StoreError
from rl_code.store.steps import Item
from rl_code.store.store import GroupStore
from rl_code.types import Context, Group, Reward, Task, ToolCall, ToolResult, Trajectory, Turn
from tests.rl_code.trajectories import read_with, record_step


def _bytes_of(ids):
    return bytes(ids).decode("utf-8", "replace")


def _group(completion: bytes = b"return 1", logprob: float = -0.5) -> Group:
    none = types.Tests()
    task = Task(
        "t/1",
        ({"role": "user", "content": "x"},),
        {},
        "a.py",
        "f",
        none,
        none,
        {"a.py": "pass"},
    )
    tokens = np.frombuffer(b"fix" + completion, np.uint8).astype(np.int32)
    sampled = np.arange(len(tokens)) >= 3
    call = ToolCall("write_file", {"content": "x"})
    turns = (
        Turn("prompt", 0, 3, "fix"),
        Turn(
            "assistant",
            3,
            len(tokens),
            _bytes_of(completion),
            (call,),
            (ToolResult("write_file", "ok", True, 0.1),),
        ),
    )
    trajectory = Trajectory(
        task_id=task.id,
        group=4,
        index=0,
        contexts=(
            Context(
                tokens=tokens,
                sampled=sampled,
                logprobs=np.where(sampled, logprob, 0).astype(np.float32),
                versions=np.where(sampled, 7, -1).astype(np.int32),
            ),
        ),
        prompt_length=3,
        turns=turns,
        status="submitted",
        reward=Reward(1.0, {"tests": 1.0}, ("slow",)),
        solved=True,
    )
    return Group(task, (trajectory,))


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


def test_a_full_disk_leaves_no_partial_trajectories(tmp_path, monkeypatch):
    write_evaluation(tmp_path, "held_out.before", 0, [_group()], _bytes_of)

    def no_room(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rl_code.host.files.os, "fsync", no_room)
    with pytest.raises(OSError, match=r"disk is full.*held_out\.after"):
        write_evaluation(tmp_path, "held_out.after", 1, [_group()], _bytes_of)
    assert evaluation_names(tmp_path) == ["held_out.before"]
    assert len(list((tmp_path / "trajectories").iterdir())) == 1


def test_trajectories_are_read_from_the_record_and_from_evaluations(tmp_path, monkeypatch):
    group = _group("é→x".encode())
    read_with(monkeypatch, _bytes_of)
    assert trajectory_steps(tmp_path) == []
    record_step(tmp_path, 12, [group, group])
    record, other = read_trajectories(tmp_path, 12)
    assert record == other and trajectory_steps(tmp_path) == [12]
    write_evaluation(tmp_path, "held_out.after", 12, [group], _bytes_of)
    assert read_evaluation(tmp_path, "held_out.after") == [record]
    assert (record["step"], record["task_id"], record["group"]) == (12, "t/1", 4)
    assert record["prompt"] == {"ids": list(b"fix"), "pieces": ["f", "i", "x"], "text": "fix"}
    (sample,) = record["trajectories"]
    assert sample["ids"] == list("é→x".encode())
    assert sample["logprobs"] == [-0.5] * 6 and sample["versions"] == [7] * 6
    assert sample["pieces"] == ["é", "", "→", "", "", "x"]
    assert sample["reward"] == {"total": 1.0, "components": {"tests": 1.0}, "flags": ["slow"]}
    assert sample["solved"] is True
    (turn,) = sample["turns"]
    assert (turn["role"], turn["start"], turn["end"]) == ("assistant", 0, 6)
    assert (
        turn["calls"][0]["arguments"] == {"content": "x"} and turn["results"][0]["content"] == "ok"
    )


@pytest.mark.parametrize(
    "text", [b"\xff\xfe", b"\xe2\x82", b"\xf0\x9f\x98\x80\xe2", b"a\xe2\x82\xacb\x80"]
)
def test_pieces_join_to_the_text_of_all_tokens(text):
    (line,) = Words(_bytes_of).lines(0, [_group(text)]).split("\n")[:-1]
    pieces = json.loads(line)["trajectories"][0]["pieces"]
    assert len(pieces) == len(text)
    assert "".join(pieces).replace("\ufffd", "") == text.decode("utf-8", "ignore")


def test_numbers_that_json_lacks_become_words():
    text = Words(_bytes_of).lines(0, [_group(logprob=math.nan)])
    record = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert "NaN" in record["trajectories"][0]["logprobs"]


def test_notes_of_signals_are_shown_where_there_are_any():
    group = _group()
    (one,) = group.trajectories
    notes = {"rubric": {"answers": {"short": True}, "said": "a\x00b"}}
    noted = dataclasses.replace(one, reward=dataclasses.replace(one.reward, notes=notes))
    lines = [
        json.loads(Words(_bytes_of).lines(0, [Group(group.task, (each,))])) for each in (one, noted)
    ]
    plain, shown = (line["trajectories"][0]["reward"] for line in lines)
    assert "notes" not in plain and shown == plain | {"notes": notes}


def test_a_group_has_a_signal_if_its_rewards_differ_by_more_than_rounding():
    group = _group()
    (one,) = group.trajectories

    def of(*totals, status="submitted"):
        made = (dataclasses.replace(one, reward=Reward(x, {})) for x in totals)
        fault = dataclasses.replace(one, reward=Reward(9.0, {}), status=status)
        return dataclasses.replace(group, trajectories=(*made, fault))

    assert has_signal(of(0.0, 1.0, status="fault"))
    assert not has_signal(of(0.3, 0.1 + 0.2, status="fault"))
    assert not has_signal(of(status="fault")) and has_signal(of(0.0))
    found = episode_metrics([of(0.0), of(1.0, status="fault")], 7)
    assert found["reward/signal_groups"] == 0.5


def test_ways_in_which_episodes_end_are_counted():
    group = _group()
    (one,) = group.trajectories
    ways = ("agent_ended", "agent_ended", "token_limit", "submitted")
    group = dataclasses.replace(
        group, trajectories=tuple(dataclasses.replace(one, status=way) for way in ways)
    )
    found = episode_metrics([group], 7)
    ended = {way: found[f"episode/{way}"] for way in (*ways, "turn_limit", "time_limit")}
    assert ended == dict(
        agent_ended=0.5, token_limit=0.25, submitted=0.25, turn_limit=0.0, time_limit=0.0
    )


def test_steps_without_a_signal_are_told_in_the_line_of_training():
    notes = []
    journal = Journal.__new__(Journal)
    journal._silent = 0
    journal.progress = types_lib.SimpleNamespace(note=notes.append)
    row = {"reward/solved": 0.0, "reward/total": -0.2, "episode/malformed_calls": 2.0}
    counts = []
    for signal in [0.0] * 7 + [0.5] + [0.0] * 3:
        journal._warn_of_silence(row | {"reward/signal_groups": signal})
        counts.append(len(notes))
    assert counts == [0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 3]
    assert notes[0].startswith("training learns nothing: in 3 steps no group had rewards that")
    assert "2.0 malformed calls per episode" in notes[0] and "docs/no_reward.md" in notes[0]


def test_what_teaches_is_credit_or_a_teacher():
    equal = {"reward/signal_groups": 0.0}
    assert not taught(equal) and taught({"reward/signal_groups": 0.1})
    # of tokens of an earlier step, or of turns
    assert taught(equal | {"train/credited": 0.01}) and not taught(equal | {"train/credited": 0.0})
    # groups that differ in a trajectory that is not trained on
    assert not taught({"reward/signal_groups": 0.1, "train/credited": 0.0})
    assert taught(equal | {"train/credited": 0.0, "teacher/share": 0.2})
    assert not taught(equal | {"train/credited": 0.0, "teacher/share": 0.0})


@pytest.mark.parametrize(
    ("passed", "mean"), [((True, False), 0.5), ((None, None), None), ((True, None), None)]
)
def test_first_edits_have_a_mean_where_they_are_known(passed, mean):
    group = _group()
    (one,) = group.trajectories
    several = tuple(dataclasses.replace(one, first_edit_passed=x) for x in passed)
    found = episode_metrics([dataclasses.replace(group, trajectories=several)], 7)
    assert found.get("reward/first_edit") == mean


def test_only_groups_that_were_trained_on_are_read_and_with_the_tokenizer_of_the_run(tmp_path):
    special = Compact.SPECIAL_TOKENS
    tokenizer = Tokenizer.train(["return 1 fix"], 300, special, eos="<|eot|>", pad="<|pad|>")
    folder = tmp_path / origin.FOLDER
    folder.mkdir()
    with pytest.raises(ConfigError, match="is no workdir of a run"):
        words_of(tmp_path)
    tokenizer.save(folder / "tokenizer.json", chat_template=None)
    (folder / "config.json").write_text("{}")
    record_step(tmp_path, 0, [_group()])
    store = GroupStore(tmp_path / STORE, "learner")
    for number, kind in enumerate(("screen", "train")):
        item = Item(1, number, 0, 1, kind, None, 4, (0, 1))
        store.plan([item])
        store.deliver(item, _group(b"abc" if kind == "train" else b"xyz"))
    store.consume(1, store.read(1), version=1)
    (record,) = read_trajectories(tmp_path, 1)
    (sample,) = record["trajectories"]
    assert sample["ids"] == list(b"abc")
    assert "".join(sample["pieces"]) == tokenizer.decode(list(b"abc"))
    with pytest.raises(StoreError, match="step 7 is not planned"):
        read_trajectories(tmp_path, 7)


def test_damaged_trajectories_are_named(tmp_path):
    write_evaluation(tmp_path, "held_out.after", 3, [_group()], _bytes_of)
    path = tmp_path / "trajectories/held_out.after.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(ValueError, match=r"held_out\.after"):
        read_evaluation(tmp_path, "held_out.after")


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


@pytest.fixture
def every_line(monkeypatch):
    """Lines of progress may follow each other at once."""
    monkeypatch.setattr(progress_lib, "_PLAIN_S", 0.0)


def test_progress_off_a_terminal_leaves_time_between_two_lines(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress_lib.time, "monotonic", lambda: now[0])
    text = io.StringIO()
    with Progress("suite", total=467, file=text) as progress:
        for done in range(1, 468):
            now[0] += 1.0
            progress.update(done)
    lines = text.getvalue().splitlines()
    assert len(lines) <= 467 / progress_lib._PLAIN_S + 2
    assert lines[-1].startswith("suite  467/467")


def test_progress_on_a_terminal_is_one_line(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    text = Terminal()
    with Progress("suite", total=467, file=text) as progress:
        for done in range(1, 468):
            progress.update(done)
    assert text.getvalue().count("\n") <= 2 and "467/467" in text.getvalue()


def test_progress_off_a_terminal_prints_plain_lines(every_line):
    text = io.StringIO()
    with Progress("train", total=3, file=text) as progress:
        for step in range(3):
            progress.update(step + 1, reward=0.5, pass_rate=0.25, tokens_per_s=1234.5, phase="[rl]")
        progress.note("wrote [report]")
    lines = text.getvalue().splitlines()
    assert lines.pop(0).startswith("train  0/3  begins; the first result waits for programs")
    assert (
        lines[0].startswith("train  1/3  reward 0.50  pass 25%  1,234 tok/s  phase [rl]")
        and "left" in lines[0]
    )
    assert lines[2].startswith("train  3/3") and "left" not in lines[2]
    assert lines[3:] == ["wrote [report]"]


def test_progress_prints_about_a_hundred_lines_of_a_long_run(every_line):
    text = io.StringIO()
    with Progress("train", total=2000, start=1000, file=text) as progress:
        for step in range(1000, 2000):
            progress.update(step + 1)
    assert len(text.getvalue().splitlines()) == 1 + 50


def test_progress_says_that_the_work_goes_on_while_no_update_comes(monkeypatch):
    waits = []

    class Event(threading.Event):
        """An end that comes in the third wait."""

        def wait(self, timeout=None):
            waits.append(timeout)
            return len(waits) == 3

    monkeypatch.setattr(progress_lib.threading, "Event", Event)
    text = io.StringIO()
    progress = Progress("suite", total=9, file=text)
    progress._stay_alive()
    assert waits == [30.0, 60.0, 120.0]
    assert [line.startswith("suite  0/9  goes on, ") for line in text.getvalue().splitlines()] == [
        True,
        True,
    ]
    assert "0 programs compiled so far" in text.getvalue()
