"""An import is whole or goes on, a changed dump is noticed, and hostile bytes are named."""

from __future__ import annotations

import gzip
import json
import shutil

import pytest
import zstandard

from rl_code.config.read_config import ConfigError
from rl_code.foreign import importing, reading
from rl_code.foreign.dump import DumpError
from rl_code.foreign.formats import find_format
from rl_code.recording import kept_config
from rl_code.recording.bisect import compare
from rl_code.report.page import write_report
from rl_code.run.workdir import CONFIG_FILE
from rl_code.store.store import GroupStore
from tests.rl_code.foreign import dumps

pytestmark = pytest.mark.usefixtures("quick_store")


def test_two_runs_part_at_the_first_group_that_differs(tmp_path):
    for name, change in (("a", None), ("b", (20, 1, 1))):
        dumps.read("trl", dumps.trl(tmp_path / f"dump_{name}", change=change), tmp_path / name)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert (found.parting.step, found.groups, found.gaps, found.inputs) == (20, 3, [], [])
    assert found.parting.words.startswith("group 1 (trl-")
    assert compare(tmp_path / "a", tmp_path / "a").parting is None


def test_two_runs_of_traces_part_at_the_answer_of_a_tool(tmp_path):
    tokenizer = dumps.tokenizer(tmp_path / "tok")
    other = dumps.changed_prime_rl(tmp_path / "dump")
    dumps.read("prime_rl", dumps.DATA / "prime_rl_a", tmp_path / "a", tokenizer)
    dumps.read("prime_rl", other, tmp_path / "b", tokenizer)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert (found.parting.step, found.parting.what, found.groups) == (2, "tool answer", 3)


def test_a_changed_log_probability_of_the_trainer_is_found(tmp_path):
    tokenizer = dumps.tokenizer(tmp_path / "tok")
    other = shutil.copytree(dumps.DATA / "prime_rl_a", tmp_path / "dump")
    notes = other / "traces/step_2/train/annotations/trainer.jsonl"
    rows = [json.loads(row) for row in notes.read_text().splitlines()]
    stream = rows[3]["branches"][0]["trainer_logprobs"]
    place = next(i for i, value in enumerate(stream) if value is not None)
    stream[place] -= 0.25
    notes.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dumps.read("prime_rl", dumps.DATA / "prime_rl_a", tmp_path / "a", tokenizer)
    dumps.read("prime_rl", other, tmp_path / "b", tokenizer)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert (found.parting.step, found.parting.what) == (2, "trainer's log-probability")
    assert f"at token {place}:" in found.parting.words


def test_what_the_imports_differ_in_is_an_input(tmp_path):
    dump = dumps.trl(tmp_path / "dump")
    dumps.read("trl", dump, tmp_path / "a")
    dumps.read("trl", dump, tmp_path / "b", weights={"tests_reward": 0.5})
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.parting.what == "reward"
    assert found.inputs == ["config.imported_from.settings.weights: None -> {'tests_reward': 0.5}"]


def test_steps_that_only_one_run_has_are_named(tmp_path):
    dumps.read("trl", dumps.trl(tmp_path / "one", steps=(10, 20, 30)), tmp_path / "a")
    dumps.read("trl", dumps.trl(tmp_path / "two", steps=(10, 30)), tmp_path / "b")
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.parting is None and found.gaps == [20] and found.groups == 4


def test_a_report_says_that_nobody_judged(tmp_path):
    dumps.read("verl", dumps.verl(tmp_path / "dump"), tmp_path / "a")
    page = write_report(tmp_path / "a", tmp_path / "a.html", search="step 3").read_text()
    assert '"passed":null' in page and '"passed":false' not in page
    assert "bytes of the texts, not sampled tokens" in page


def test_an_import_that_was_killed_goes_on(tmp_path, monkeypatch):
    dump = dumps.verl(tmp_path / "dump")
    whole = dumps.read("verl", dump, tmp_path / "whole")
    delivered = []
    deliver = GroupStore.deliver

    def killed(store, item, group):
        if len(delivered) == 3:  # in the middle of the second step
            raise KeyboardInterrupt
        delivered.append(item)
        return deliver(store, item, group)

    monkeypatch.setattr(GroupStore, "deliver", killed)
    with pytest.raises(KeyboardInterrupt):
        dumps.read("verl", dump, tmp_path / "run")
    monkeypatch.undo()
    found = dumps.read("verl", dump, tmp_path / "run")
    assert found.new == 2 and found.groups == whole.groups
    assert compare(tmp_path / "whole", tmp_path / "run").groups == 6
    assert dumps.read("verl", dump, tmp_path / "run").new == 0


def test_a_run_that_goes_on_is_followed_and_one_that_changed_is_refused(tmp_path):
    dump = dumps.verl(tmp_path / "dump", steps=(1, 2))
    dumps.read("verl", dump, tmp_path / "run")
    (dumps.verl(tmp_path / "later", steps=(3,)) / "3.jsonl").rename(dump / "3.jsonl")
    assert dumps.read("verl", dump, tmp_path / "run").new == 1
    lines = (dump / "1.jsonl").read_text()
    (dump / "1.jsonl").write_text(lines.replace("step 1", "step one", 1))
    with pytest.raises(DumpError, match="step 1 is another one now"):
        dumps.read("verl", dump, tmp_path / "run")


def test_a_workdir_of_another_import_or_of_a_run_of_ours_is_refused(tmp_path):
    dump = dumps.verl(tmp_path / "dump")
    dumps.read("verl", dump, tmp_path / "run")
    with pytest.raises(ConfigError, match="was imported otherwise"):
        dumps.read("verl", dump, tmp_path / "run", dumps.tokenizer(tmp_path / "tok"))
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / CONFIG_FILE).write_text("{}")
    with pytest.raises(ConfigError, match="holds a run of ours"):
        dumps.read("verl", dump, tmp_path / "own")
    with pytest.raises(ConfigError, match="imported from verl: "):
        kept_config.read(tmp_path / "run")


def test_a_format_from_elsewhere_is_named_as_an_object():
    assert find_format("rl_code.foreign.verl:Verl", {}) == find_format("verl", {})


def line(**fields) -> str:
    """A line of verl."""
    row = {"input": "a", "output": "b", "gts": None, "score": 1.0, "step": 1} | fields
    return json.dumps({name: value for name, value in row.items() if value is not ...})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected a line for each response, found an empty file"),
        ("no json\n", "1.jsonl, line 1: expected a JSON object, found b'no json"),
        ('{"input": "a", ', "it is cut short: import it when the run has ended"),
        ("[1]\n", r"1.jsonl, line 1: expected a JSON object, found \[1\]"),
        (line(output=...), "line 1, field 'output': expected a text, found no such field"),
        (line() + "\n" + line(input=3), "line 2, field 'input': expected a text, found 3"),
        (line(score="high"), "field 'score': expected a number, found 'high'"),
        (line(step=2), "field 'step': expected 1, as the file's name says, found 2"),
        (line(step=-1), "field 'step': expected a whole number from 0 on, found -1"),
        (
            line(x=1)[:-1] + ',"d":' + "[" * 200_000 + "]" * 200_000 + "}",
            "nested more than 64 deep",
        ),
        (line(x=1)[:-1] + ',"d":' + "[" * 99 + "]" * 99 + "}", "nested more than 64 deep"),
        (line(x=1)[:-1] + ',"n":' + "9" * 5000 + "}", "expected a JSON object"),
    ],
)
def test_bad_lines_are_named(tmp_path, text, words):
    (tmp_path / "1.jsonl").write_text(text)
    with pytest.raises(DumpError, match=words):
        dumps.read("verl", tmp_path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_lines_that_are_too_long_and_bytes_that_are_no_text_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MOST_OF_LINE", 1000)
    (tmp_path / "1.jsonl").write_text(line(output="b" * 1000))
    with pytest.raises(DumpError, match="a line of more than 1,000 bytes"):
        dumps.read("verl", tmp_path, tmp_path / "run")
    (tmp_path / "1.jsonl").write_bytes(b'{"input": "\xff"}\n')
    with pytest.raises(DumpError, match="line 1: byte 11 is no UTF-8"):
        dumps.read("verl", tmp_path, tmp_path / "run")


def test_files_of_another_kind_are_refused(tmp_path):
    (tmp_path / "completions_00001.parquet").write_bytes(gzip.compress(b"x"))
    with pytest.raises(DumpError, match="expected a Parquet file"):
        dumps.read("trl", tmp_path, tmp_path / "run")
    whole = next(dumps.trl(tmp_path / "trl").iterdir()).read_bytes()
    for broken in (whole[: len(whole) // 2], whole[:40] + b"\0" * 40 + whole[80:]):
        (tmp_path / "completions_00001.parquet").write_bytes(broken)
        with pytest.raises(DumpError):
            dumps.read("trl", tmp_path / "completions_00001.parquet", tmp_path / "run")
    with pytest.raises(DumpError, match=r"holds no <step>\.jsonl of verl"):
        dumps.read("verl", tmp_path, tmp_path / "run")
    with pytest.raises(DumpError, match="no such file or folder"):
        dumps.read("verl", tmp_path / "nowhere", tmp_path / "run")
    (tmp_path / "notes.jsonl").write_text(line())
    with pytest.raises(DumpError, match=r"a file named <step>\.jsonl, found notes"):
        dumps.read("verl", tmp_path, tmp_path / "run")


def edited(tmp_path, edit):
    """The traces of a step, one of which is edited."""
    source = dumps.DATA / "prime_rl_a/traces/step_1/train/traces.jsonl"
    rows = [json.loads(row) for row in source.read_text().splitlines()]
    edit(rows[1]["traces"][0])
    folder = tmp_path / "traces" / "step_1" / "train"
    folder.mkdir(parents=True)
    (folder / "traces.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "traces"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t["nodes"][1].update(parent=1), "the number of an earlier node, found 1"),
        (lambda t: t["nodes"][1].update(parent=-1), "the number of an earlier node, found -1"),
        (lambda t: t["nodes"][1].update(token_ids="abc"), "token_ids': expected a list"),
        (lambda t: t["nodes"][1].update(token_ids=[[1]]), "expected a list of ids"),
        (lambda t: t["nodes"][1].update(token_ids=[-1]), "expected ids from 0 on"),
        (lambda t: t["nodes"][1].update(token_ids=[2**40]), "expected ids from 0 on"),
        (lambda t: t["nodes"][1]["token_ids"].append(300), "'mask': expected 40 values"),
        (lambda t: t["nodes"][1]["token_ids"].__setitem__(0, 300), "token id 300; the tokenizer"),
        (lambda t: t["nodes"][1]["logprobs"].pop(), "one for each sampled token"),
        (lambda t: t["nodes"][1].update(message=None), "messages with a role, found None"),
        (lambda t: t["nodes"][0]["mask"].__setitem__(0, True), "message that was not sampled"),
        (lambda t: t.update(version=2), r"a schema among \(1,\), found 2"),
        (lambda t: t.update(rewards={"a": 1.0}), "rewards.a': expected an object with a score"),
    ],
)  # fmt: skip
def test_bad_traces_are_named(tmp_path, edit, words):
    tokenizer = dumps.tokenizer(tmp_path / "tok")
    with pytest.raises(DumpError, match=words) as error:
        dumps.read("prime_rl", edited(tmp_path, edit), tmp_path / "run", tokenizer)
    assert "traces.jsonl, line 2" in str(error.value)


def test_ids_without_a_tokenizer_are_refused_unless_texts_are_asked_for(tmp_path):
    dump = dumps.DATA / "prime_rl_a"
    with pytest.raises(DumpError, match="it holds token ids; name the tokenizer"):
        dumps.read("prime_rl", dump, tmp_path / "run")
    encoder = importing.Encoder.read(None)
    own = importing.Settings("prime_rl", {}, encoder, as_text=True)
    source = find_format("prime_rl", {})
    found = importing.import_run(source, [dump], tmp_path / "run", own)
    assert found.sampled == 0 and found.tokens > 0


def test_a_stream_that_is_packed_is_read_and_one_that_is_too_large_is_refused(
    tmp_path, monkeypatch
):
    """The newest layout: episodes of all steps in one stream, notes in others."""
    tokenizer = dumps.tokenizer(tmp_path / "tok")
    run = dumps.DATA / "prime_rl_a/traces"
    stream = tmp_path / "dump" / "traces"
    for kind, name in (("", "traces"), ("annotations/orchestrator/", "annotations/orchestrator"),
                       ("annotations/trainer/", "annotations/trainer")):  # fmt: skip
        data = b"".join((run / f"step_{step}/train/{name}.jsonl").read_bytes() for step in (1, 2))
        path = stream / kind / "00000.jsonl.zst"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(zstandard.compress(data))
    found = dumps.read("prime_rl", tmp_path / "dump", tmp_path / "run", tokenizer)
    assert (found.steps, found.episodes) == ([1, 2], 8) and found.both == found.sampled > 0
    dumps.read("prime_rl", dumps.DATA / "prime_rl_a", tmp_path / "other", tokenizer)
    assert compare(tmp_path / "run", tmp_path / "other").parting is None
    monkeypatch.setattr(reading, "MOST_OF_FILE", 1000)
    with pytest.raises(DumpError, match="more than 1,000 bytes when unpacked"):
        dumps.read("prime_rl", tmp_path / "dump", tmp_path / "third", tokenizer)
