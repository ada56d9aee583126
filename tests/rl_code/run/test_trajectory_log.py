"""Trajectories in words: from the record and from evaluations, whole or not at all."""

from __future__ import annotations

import dataclasses
import errno
import json
import math

import pytest

import rl_code.host.files
from models.tokenizer import Tokenizer
from rl_code.config.read_config import ConfigError
from rl_code.environment.protocols.compact import Compact
from rl_code.run import origin
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
from rl_code.types import Group
from tests.rl_code.trajectories import bytes_of, group_of_one, read_with, record_step


def test_a_full_disk_leaves_no_partial_trajectories(tmp_path, monkeypatch):
    write_evaluation(tmp_path, "held_out.before", 0, [group_of_one()], bytes_of)

    def no_room(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rl_code.host.files.os, "fsync", no_room)
    with pytest.raises(OSError, match=r"disk is full.*held_out\.after"):
        write_evaluation(tmp_path, "held_out.after", 1, [group_of_one()], bytes_of)
    assert evaluation_names(tmp_path) == ["held_out.before"]
    assert len(list((tmp_path / "trajectories").iterdir())) == 1


def test_trajectories_are_read_from_the_record_and_from_evaluations(tmp_path, monkeypatch):
    group = group_of_one("é→x".encode())
    read_with(monkeypatch, bytes_of)
    assert trajectory_steps(tmp_path) == []
    record_step(tmp_path, 12, [group, group])
    record, other = read_trajectories(tmp_path, 12)
    assert record == other and trajectory_steps(tmp_path) == [12]
    write_evaluation(tmp_path, "held_out.after", 12, [group], bytes_of)
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
    (line,) = Words(bytes_of).lines(0, [group_of_one(text)]).split("\n")[:-1]
    pieces = json.loads(line)["trajectories"][0]["pieces"]
    assert len(pieces) == len(text)
    assert "".join(pieces).replace("\ufffd", "") == text.decode("utf-8", "ignore")


def test_numbers_that_json_lacks_become_words():
    text = Words(bytes_of).lines(0, [group_of_one(logprob=math.nan)])
    record = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert "NaN" in record["trajectories"][0]["logprobs"]


def test_notes_of_signals_are_shown_where_there_are_any():
    group = group_of_one()
    (one,) = group.trajectories
    notes = {"rubric": {"answers": {"short": True}, "said": "a\x00b"}}
    noted = dataclasses.replace(one, reward=dataclasses.replace(one.reward, notes=notes))
    lines = [
        json.loads(Words(bytes_of).lines(0, [Group(group.task, (each,))])) for each in (one, noted)
    ]
    plain, shown = (line["trajectories"][0]["reward"] for line in lines)
    assert "notes" not in plain and shown == plain | {"notes": notes}


def test_only_groups_that_were_trained_on_are_read_and_with_the_tokenizer_of_the_run(tmp_path):
    special = Compact.SPECIAL_TOKENS
    tokenizer = Tokenizer.train(["return 1 fix"], 300, special, eos="<|eot|>", pad="<|pad|>")
    folder = tmp_path / origin.FOLDER
    folder.mkdir()
    with pytest.raises(ConfigError, match="is no workdir of a run"):
        words_of(tmp_path)
    tokenizer.save(folder / "tokenizer.json", chat_template=None)
    (folder / "config.json").write_text("{}")
    record_step(tmp_path, 0, [group_of_one()])
    store = GroupStore(tmp_path / STORE, "learner")
    for number, kind in enumerate(("screen", "train")):
        item = Item(1, number, 0, 1, kind, None, 4, (0, 1))
        store.plan([item])
        store.deliver(item, group_of_one(b"abc" if kind == "train" else b"xyz"))
    store.consume(1, store.read(1), version=1)
    (record,) = read_trajectories(tmp_path, 1)
    (sample,) = record["trajectories"]
    assert sample["ids"] == list(b"abc")
    assert "".join(sample["pieces"]) == tokenizer.decode(list(b"abc"))
    with pytest.raises(StoreError, match="step 7 is not planned"):
        read_trajectories(tmp_path, 7)


def test_damaged_trajectories_are_named(tmp_path):
    write_evaluation(tmp_path, "held_out.after", 3, [group_of_one()], bytes_of)
    path = tmp_path / "trajectories/held_out.after.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(ValueError, match=r"held_out\.after"):
        read_evaluation(tmp_path, "held_out.after")
