"""Parts of an episode: which tokens are theirs, what they are credited with, that others' stay."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rl_code.config.read_config import ConfigError
from rl_code.learner.advantages import ADVANTAGES, group_advantages
from rl_code.learner.batching import PackConfig, pack
from rl_code.learner.parts import PARTS, PartsConfig, credited, trained
from rl_code.types import Context, Group, Reward, Task, Trajectory, Turn

PROMPT = (1, 2, 3)
DR_GRPO = ADVANTAGES["dr_grpo"]()


def context(tokens, sampled, parent=-1, kept=0):
    """sampled: one letter for each token, s where it was sampled."""
    chosen = np.array([letter == "s" for letter in sampled])
    assert len(chosen) == len(tokens)
    return Context(
        np.array(tokens, np.int32),
        chosen,
        np.where(chosen, -1.0, 0.0).astype(np.float32),
        np.where(chosen, 0, -1).astype(np.int32),
        parent,
        kept,
    )


def messages(contexts, texts=None):
    """Turns of contexts: each run of sampled tokens is a message, each of others is given."""
    turns = []
    for number, each in enumerate(contexts):
        borders = np.flatnonzero(np.diff(each.sampled)) + 1
        starts, ends = [0, *borders], [*borders, len(each.tokens)]
        for start, end in zip(starts, ends, strict=True):
            role = "assistant" if each.sampled[start] else ("tool" if start else "prompt")
            text = (texts or {}).get((number, int(start)), "")
            turns.append(Turn(role, int(start), int(end), text, context=number))
    return tuple(turns)


def trajectory(contexts, reward=0.0, index=0, texts=None):
    turns = messages(contexts, texts)
    total = Reward(reward, {})
    return Trajectory("t", 0, index, tuple(contexts), 3, turns, "submitted", total)


def linear(reward=0.0, index=0):
    return trajectory([context([*PROMPT, 5, 6, 7], "...sss")], reward, index)


def summarised(reward=0.0, index=0, summary=(8, 9)):
    """A message, a result with a request, a summary; then the summary as given, and a message."""
    first = context([*PROMPT, 5, 6, 7, *summary], "...ss." + "s" * len(summary))
    second = context([*summary, 4, 5, 6], "." * len(summary) + ".ss", 0, 3)
    return trajectory([first, second], reward, index)


def with_sub_agent(reward=0.0, index=0):
    first = context([*PROMPT, 5, 6, 7, 8], "...ss.s")
    return trajectory([first, context([20, 21, 22, 23], "..ss")], reward, index)


def of(name, t):
    """Tokens of a part, by context."""
    return [c.tokens[mask].tolist() for c, mask in zip(t.contexts, PARTS[name](t), strict=True)]


def test_a_summary_is_the_message_with_which_the_next_context_begins():
    assert of("summaries", summarised()) == [[8, 9], []]
    assert of("summaries", summarised(summary=(4,))) == [[4], []]  # an empty one: its stop token
    for other in (linear(), with_sub_agent()):
        assert not any(of("summaries", other))
    # a message that is kept, not given again
    first = context([*PROMPT, 5, 6], "...ss")
    assert not any(of("summaries", trajectory([first, context([7, 5], ".s", 0, 5)])))


def test_a_summary_of_others_is_found_by_its_text():
    said = "The bug is in load(), the test is written."
    first = context([*PROMPT, 5, 6, 7, 7, 7, 7, 7, 8, 9], "...ss.....ss")
    second = context([30, 31, 32, 5], "...s", 0, 2)
    texts = {(0, 10): f"<think>hm</think>\n{said}<|im_end|>", (1, 0): f"user: Summary: {said} Go."}
    assert of("summaries", trajectory([first, second], texts=texts)) == [[8, 9], []]
    # too short to tell, another text, and a history that did not shrink
    short = {(0, 10): "ok<|im_end|>", (1, 0): "ok, go on"}
    assert not any(of("summaries", trajectory([first, second], texts=short)))
    other = texts | {(1, 0): "user: begin again"}
    assert not any(of("summaries", trajectory([first, second], texts=other)))
    longer = context([*[30] * 20, 5], "." * 20 + "s", 0, 2)
    assert not any(of("summaries", trajectory([first, longer], texts=texts)))


def test_sub_agents_are_the_contexts_behind_another_root():
    assert of("sub_agents", with_sub_agent()) == [[], [20, 21, 22, 23]]
    assert not any(of("sub_agents", summarised()))
    t = with_sub_agent()
    below = context([24, 25], ".s", 1, 4)
    assert of("sub_agents", trajectory([*t.contexts, below])) == [[], [20, 21, 22, 23], [24, 25]]


def test_a_message_that_was_asked_for_again_is_rejected_unless_something_goes_on_from_it():
    first = context([*PROMPT, 5, 6], "...ss")
    again = context([7, 8], "ss", 0, 3)
    assert of("rejected", trajectory([first, again])) == [[5, 6], []]
    # given tokens that both have, which the second one has of its own
    apart = context([3, 7, 8], ".ss", 0, 2)
    assert of("rejected", trajectory([first, apart])) == [[5, 6], []]
    goes_on = context([9, 10], ".s", 0, 5)
    assert not any(of("rejected", trajectory([first, again, goes_on])))
    assert not any(of("rejected", summarised()))


def test_what_is_not_trained_stands_as_given():
    t = summarised()
    credit = np.array([1, 2, 3, 4, 5, 6], np.float32)
    kept, left = trained(t, credit, ("summaries",))
    assert np.asarray(left).tolist() == [1, 2, 5, 6]
    assert [c.tokens[c.sampled].tolist() for c in kept.contexts] == [[5, 6], [5, 6]]
    np.testing.assert_array_equal(kept.tokens, t.tokens)
    assert trained(t, 0.5, ("summaries",))[1] == 0.5
    same, _ = trained(linear(), 0.5, ("summaries", "sub_agents", "rejected"))
    assert same.contexts[0].sampled.tolist() == linear().contexts[0].sampled.tolist()
    noted = {"experts": np.arange(6)[:, None]}
    chosen = (
        dataclasses.replace(t.contexts[0], choices={"experts": noted["experts"][:4]}),
        dataclasses.replace(t.contexts[1], choices={"experts": noted["experts"][4:]}),
    )
    kept, _ = trained(dataclasses.replace(t, contexts=chosen), credit, ("summaries",))
    assert [c.choices["experts"].ravel().tolist() for c in kept.contexts] == [[0, 1], [4, 5]]


def test_a_part_with_a_credit_of_its_own_is_compared_among_those_that_have_it():
    group = Group(
        Task("t", ()),
        (with_sub_agent(1.0, 0), linear(0.0, 1), with_sub_agent(0.5, 2), linear(0.5, 3)),
    )
    advantages = group_advantages([group], DR_GRPO)
    assert np.allclose(advantages[0], [0.5, -0.5, 0.0, 0.0])
    (found,) = credited([group], advantages, DR_GRPO, PartsConfig(sub_agents="own"))
    # the mean of both rewards is 0.75
    assert np.asarray(found[0]).tolist() == [0.5, 0.5, 0.5, 0.25, 0.25]
    assert np.asarray(found[2]).tolist() == [0.0, 0.0, 0.0, -0.25, -0.25]
    assert found[1] == -0.5 and found[3] == 0.0
    assert credited([group], advantages, DR_GRPO, PartsConfig()) is advantages


def test_a_batch_has_no_targets_of_what_is_not_trained():
    group = Group(Task("t", ()), (summarised(1.0), with_sub_agent(0.0, 1)))
    config = PackConfig(rows=2, slots=32, targets=16)
    whole, _ = pack([group], [[0.5, -0.5]], config, version=0)
    assert sorted(whole.targets[whole.mask > 0]) == [5, 5, 5, 6, 6, 6, 8, 8, 9, 22, 23]
    parts = dataclasses.replace(config, untrained=("summaries", "sub_agents"))
    some, _ = pack([group], [[0.5, -0.5]], parts, version=0)
    assert sorted(some.targets[some.mask > 0]) == [5, 5, 5, 6, 6, 6, 8]
    # nothing is read of a sub-agent that is not trained, and the prompt stands once
    assert np.sum(some.tokens == 3) == 1 and not np.any(some.tokens == 20)


def test_a_credit_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"train.parts.sub_agents = 'all' must be"):
        PartsConfig(sub_agents="all")
    assert PartsConfig(sub_agents="none", summaries="none").paid("none") == (
        "summaries",
        "sub_agents",
    )
