"""Each format becomes groups of ours: what its files hold is there, and nothing is made up."""

from __future__ import annotations

import datetime
import json

import numpy as np
import pytest

from rl_code.foreign.dump import DumpError
from rl_code.foreign.mismatch import by_token, of_groups
from rl_code.foreign.tokens import byte_tokenizer
from rl_code.metrics.values import read_metrics
from tests.rl_code.foreign import dumps

pytestmark = pytest.mark.usefixtures("quick_store")


def nothing_is_said_to_be_sampled(group) -> bool:
    return all(
        not one.sampled.any()
        and (one.versions == -1).all()
        and not one.logprobs.any()
        and one.trainer_logprobs is None
        for one in group.trajectories
    )


def test_lines_of_verl_are_texts_that_nobody_sampled(tmp_path):
    found = dumps.read("verl", dumps.verl(tmp_path / "dump"), tmp_path / "run")
    assert (found.steps, found.groups, found.episodes, found.sampled) == ([1, 2, 3], 6, 12, 0)
    first, second = dumps.groups(tmp_path / "run", 2)
    assert nothing_is_said_to_be_sampled(first) and nothing_is_said_to_be_sampled(second)
    one = second.trajectories[1]
    decode = byte_tokenizer().decode
    assert decode(one.tokens) == dumps.PROMPTS[1] + dumps.answers(2, 1)[1]
    assert decode(one.tokens[: one.prompt_length]) == dumps.PROMPTS[1]
    assert (one.reward.total, one.scores, second.task.meta["gts"]) == (1.0, {"acc": 1.0}, "1")
    assert one.reward.notes["dump"]["uid"] == "s1_1_0" and one.status == "not recorded"
    assert [row["reward/total"] for row in read_metrics(tmp_path / "run")] == [0.5] * 3


def test_a_named_tokenizer_makes_tokens_of_texts_and_still_none_is_sampled(tmp_path):
    folder = tmp_path / "tok"
    byte_tokenizer().save(folder / "tokenizer.json")
    dumps.read("verl", dumps.verl(tmp_path / "dump"), tmp_path / "run", folder)
    assert all(map(nothing_is_said_to_be_sampled, dumps.groups(tmp_path / "run", 1)))


def test_two_groups_on_one_prompt_are_told_apart_by_the_keys_of_verl(tmp_path):
    def same(row):
        row["input"], row["gts"] = dumps.PROMPTS[0], "0"

    dumps.read("verl", dumps.verl(tmp_path / "dump", change=same), tmp_path / "run")
    assert [len(group.trajectories) for group in dumps.groups(tmp_path / "run", 1)] == [2, 2]


def test_tables_of_trl_keep_their_steps_and_their_gaps(tmp_path):
    found = dumps.read("trl", dumps.trl(tmp_path / "dump"), tmp_path / "run")
    assert (found.steps, found.groups, found.episodes) == ([10, 20], 4, 8)
    one = dumps.groups(tmp_path / "run", 20)[0].trajectories[1]
    assert one.reward.components == {"tests_reward": 1.0}
    assert one.reward.notes["dump"] == {"advantage": 0.5}


def test_conversations_of_trl_have_their_calls_and_results(tmp_path):
    dumps.read("trl", dumps.trl(tmp_path / "dump", chat=True), tmp_path / "run")
    (one, _) = dumps.groups(tmp_path / "run", 10)[0].trajectories
    assert [turn.role for turn in one.turns] == ["prompt", "assistant", "tool", "assistant"]
    assert one.turns[1].calls[0].name == "run" and one.turns[1].calls[0].arguments["fast"] is True
    assert one.turns[2].results[0].content == "1 failed"


def test_columns_of_trl_that_may_be_rewards_are_not_guessed(tmp_path):
    dump = dumps.trl(tmp_path / "dump", length=7.0)
    with pytest.raises(DumpError, match=r"found tests_reward, length; .*--format_settings"):
        dumps.read("trl", dump, tmp_path / "run")
    dumps.read("trl", dump, tmp_path / "named", rewards=("tests_reward", "length"),
               weights={"length": 0.1})  # fmt: skip
    one = dumps.groups(tmp_path / "named", 10)[0].trajectories[1]
    assert one.reward.total == pytest.approx(1.7)


def test_columns_that_json_does_not_know_are_words_in_the_notes(tmp_path):
    when = datetime.datetime(2026, 1, 2)
    dump = dumps.trl(tmp_path / "dump", when=when, raw=b"\xff", extra={"a": [1, None]})
    dumps.read("trl", dump, tmp_path / "run")
    notes = dumps.groups(tmp_path / "run", 10)[0].trajectories[0].reward.notes["dump"]
    assert "2026, 1, 2" in notes["when"] and notes["raw"] == repr(b"\xff")
    assert notes["extra"] == {"a": [1, None]}


def test_a_reward_that_is_no_number_is_a_flag(tmp_path):
    def broken(row):
        row["score"] = float("nan")

    dumps.read("verl", dumps.verl(tmp_path / "dump", change=broken), tmp_path / "run")
    reward = dumps.groups(tmp_path / "run", 1)[0].trajectories[0].reward
    assert reward.total == 0.0 and reward.flags == ("reward nan", "score nan")


def test_traces_of_prime_rl_keep_tokens_branches_versions_and_both_log_probabilities(tmp_path):
    tokenizer = dumps.tokenizer(tmp_path / "tok")
    found = dumps.read("prime_rl", dumps.DATA / "prime_rl_a", tmp_path / "run", tokenizer)
    assert (found.steps, found.groups, found.episodes) == ([1, 2], 4, 8)
    assert 0 < found.sampled == found.both
    group = dumps.groups(tmp_path / "run", 2)[0]
    one = group.trajectories[0]
    raw = dumps.DATA / "prime_rl_a/traces/step_2/train/traces.jsonl"
    traces = [json.loads(line)["traces"][0] for line in raw.read_text().splitlines()]
    trace = next(t for t in traces if t["id"] == one.reward.notes["dump"]["trace"])
    # a branch is the tokens of its nodes from the root on, as the package joins them
    ends = [3, 5]
    for index, leaf in enumerate(ends):
        path = []
        node = leaf
        while node is not None:
            path.insert(0, node)
            node = trace["nodes"][node].get("parent")
        ids = [id for node in path for id in trace["nodes"][node]["token_ids"]]
        assert one.whole(index).tolist() == ids
    logprobs = [x for node in trace["nodes"] for x in node["logprobs"]]
    np.testing.assert_array_equal(one.logprobs[one.sampled], np.float32(logprobs))
    assert set(one.versions[one.sampled]) == {1} and one.solved is False
    assert one.reward.components == {"tests": 0.0, "brief": pytest.approx(0.05)}
    assert one.status == "agent_completed" and one.scores == {"lines": 1.0}
    assert one.reward.notes["dump"]["info"]["ship"]["step"] == 2


def test_the_token_of_the_greatest_mismatch_comes_first(tmp_path):
    tokenizer = dumps.tokenizer(tmp_path / "tok")
    dumps.read("prime_rl", dumps.DATA / "prime_rl_a", tmp_path / "run", tokenizer)
    found = of_groups(dumps.groups(tmp_path / "run", 1))
    # the maker of the file moved the first token of each branch by 1.51, all others by 0.01
    first = [chr(token) for token, *_ in by_token(found)[:2]]
    assert sorted(first) == ["d", "s"]
    assert np.abs(found.log_ratio).max() == pytest.approx(1.51, abs=1e-3)
    row = read_metrics(tmp_path / "run")[0]
    assert row["policy/mismatch_max"] == pytest.approx(1.51, abs=1e-3)


def test_evaluations_do_not_depend_on_the_order_in_which_episodes_end(tmp_path):
    for name in "ab":
        dumps.read("verifiers", dumps.DATA / f"verifiers_{name}", tmp_path / name)
    # the ids of traces are the only notes that differ, and they are equal here
    one, other = (dumps.groups(tmp_path / name, 0) for name in "ab")
    assert [group.task for group in one] == [group.task for group in other]
    assert all(map(nothing_is_said_to_be_sampled, one))
    texts = [[turn.text for turn in one[0].trajectories[i].turns] for i in range(2)]
    assert "def double(x): return x*2" in "".join(texts[0] + texts[1])


def test_older_layouts_of_prime_rl_are_read_by_their_folders(tmp_path):
    """A trace a line, and a second copy of those that were trained on."""
    tokenizer = dumps.tokenizer(tmp_path / "tok")
    source = dumps.DATA / "prime_rl_a/traces/step_1/train/traces.jsonl"
    lines = [json.loads(line)["traces"][0] for line in source.read_text().splitlines()]
    for subset, taken in (("all", lines), ("effective", lines[:2])):
        folder = tmp_path / "dump/rollouts/step_7/train" / subset
        folder.mkdir(parents=True)
        (folder / "traces.jsonl").write_text("".join(json.dumps(x) + "\n" for x in taken))
    found = dumps.read("prime_rl", tmp_path / "dump", tmp_path / "run", tokenizer)
    assert (found.steps, found.episodes, found.both) == ([7], 4, 0)
