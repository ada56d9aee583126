"""Rules of memory on a record that is written by hand: what each of them keeps."""

from __future__ import annotations

import dataclasses

import pytest

from configs import quickstart
from rl_code.config.named import Named
from rl_code.config.read_config import ConfigError, build
from rl_code.environment.tools.api import find_tools
from rl_code.environment.tools.memory import recalled
from rl_code.rollout.memory import RULES, MemoryConfig, Note, find_rule
from rl_code.run.config import RunConfig
from rl_code.types import Context, Group, Reward, Task, ToolCall, ToolResult, Trajectory, Turn
from tests.rl_code.learner.test_parts import context

NAMES = ("write_file", "run_tests", "terminal", "memory_recall", "memory_forget", "submit")
TOOLS = find_tools((*map(Named, NAMES), Named("memory_store", {"most": 3})))
TASK = Task("shop/1", (), path="a.py", entry_point="total")


def store(name, text):
    call = ToolCall("memory_store", {"name": name, "text": text})
    return call, ToolResult("memory_store", "stored")


def forget(name):
    return ToolCall("memory_forget", {"name": name}), ToolResult("memory_forget", "forgotten")


def recall(*shown):
    content = "\n".join(f"{name}: {text}" for name, text in shown)
    return ToolCall("memory_recall", {"question": "x"}), ToolResult("memory_recall", content)


def run_tests(content, *, ok=True):
    return ToolCall("run_tests", {}), ToolResult("run_tests", content, ok=ok)


def write(text):
    arguments = {"path": "a.py", "content": text}
    return ToolCall("write_file", arguments), ToolResult("write_file", "ok")


def played(*messages, status="submitted", last=None):
    """A trajectory of messages, each some calls with their results; last: a closing text."""
    turns = [Turn("prompt", 0, 1, "")]
    for number, message in enumerate(messages, start=1):
        calls, results = zip(*message, strict=True)
        turns.append(Turn("assistant", number, number + 1, "", calls))
        turns.append(Turn("tool", number + 1, number + 1, "", results=results))
    if last is not None:
        turns.append(Turn("assistant", len(messages) + 2, len(messages) + 3, last))
    contexts: tuple[Context, ...] = (context([1] * 20, "." * 20),)
    return Trajectory("shop/1", 0, 0, contexts, 1, tuple(turns), status, Reward(0.0, {}))


def after(rule, *trajectories, before=(), **settings):
    """Texts by name that a rule keeps, the oldest first."""
    notes = {name: Note(text) for name, text in before}
    found = find_rule(Named(rule, settings), "rule").after(Group(TASK, trajectories), TOOLS, notes)
    return {name: note.text for name, note in found.items()}


def test_calls_are_followed_within_the_bounds_of_the_tools():
    first = played([store("a", "1"), store("b", "2")], [forget("a"), store("c", "3")])
    assert after("calls", first) == {"b": "2", "c": "3"}
    assert after("calls", first, played([store("b", "4"), store("d", "5"), store("e", "6")])) == {
        "b": "4",
        "d": "5",
        "e": "6",
    }
    assert after("none", first, before=[("z", "0")]) == {}
    assert after("all", first, played([store(f"n{i}", "x") for i in range(5)])) == {
        **{"a": "1", "b": "2", "c": "3"},
        **{f"n{i}": "x" for i in range(5)},
    }


def test_a_call_that_failed_stores_nothing():
    call, _ = store("a", "1")
    wrong = (call, ToolResult("memory_store", "at most 400", ok=False))
    malformed = (dataclasses.replace(call, error="no"), ToolResult("memory_store", "no", ok=True))
    for rule in ("calls", "all", "recency", "use_count"):
        assert after(rule, played([wrong, malformed])) == {}


def test_recency_keeps_the_newest_and_use_count_those_that_were_shown():
    made = played([store("a", "1"), store("b", "2")])
    shown = played([recall(("a", "1"))], [recall(("a", "1"), ("b", "2"))])
    more = played([store("c", "3")])
    assert after("recency", made, shown, more, most=2) == {"b": "2", "c": "3"}
    # shown twice, once, and just stored; then once more
    assert after("use_count", made, shown, more, most=2) == {"a": "1", "c": "3"}
    again = played([recall(("c", "3"))], [store("d", "4")])
    assert after("use_count", made, shown, more, again, most=2) == {"a": "1", "d": "4"}
    # of equals the oldest goes; what is stored again keeps its uses
    assert after("use_count", made, more, most=2) == {"b": "2", "c": "3"}
    anew = played([store("a", "9")])
    assert after("use_count", made, shown, anew, more, most=2) == {"a": "9", "c": "3"}


def test_what_failed_is_kept_with_its_mend():
    one = played(
        [run_tests("FAIL total([1]) gave 0 want 1 left 3")],
        [write("def total(x):\n    return x[0]")],
        [run_tests("FAIL total([]) error IndexError left 2")],
        [write("def total(x):\n    return sum(x)")],
        [run_tests("PASS left 1")],
    )
    assert after("error_driven", one) == {
        "total": "FAIL total([1]) gave 0 want 1 left 3 | mended by a.py def total(x): return sum(x)"
    }
    # calls store nothing, and what never failed leaves nothing
    assert after("error_driven", played([store("a", "1")], [run_tests("PASS left 1")])) == {}
    never = played([run_tests("FAIL f() gave 1 want 2 left 0")])
    assert after("error_driven", never)["total"].endswith("| mended by nothing")
    verbose = played([run_tests("1 of 2 visible tests passed.\nFAILED f(1)\n2 test runs left.")])
    assert "FAILED f(1)" in after("error_driven", verbose)["total"]
    assert len(after("error_driven", one, longest=40)["total"]) <= 40


@pytest.mark.parametrize(
    ("content", "failed"),
    [("exit 0", False), ("a\nexit 1", True), ("stopped after 5 s", True), ("ok", False)],
)
def test_a_command_fails_by_its_exit_code(content, failed):
    assert TOOLS["terminal"].failed(content, ok=True) == failed


def test_the_last_message_is_kept_where_it_was_asked_for():
    kept = played([write("x")], last="totals are sums <|eot|>")
    assert after("summary", kept) == {"total": "totals are sums"}
    assert after("summary", kept, longest=6, tokens=9)["total"] != "totals are sums"
    for other in (
        played([write("x")]),
        played([write("x")], last="<|eot|>"),
        played([write("x")], last="late", status="token_limit"),
    ):
        assert after("summary", other, before=[("a", "1")]) == {"a": "1"}
    assert find_rule(Named("summary", {"tokens": 7}), "rule").closing.tokens == 7
    assert all(find_rule(Named(n), "r").closing is None for n in RULES if n != "summary")


def test_a_result_names_the_notes_that_it_shows():
    assert recalled("a: 1\nb: two\nlines", ["a", "b", "lines", "c"]) == ["a", "b"]
    assert recalled("cart, tax", ["cart", "tax"]) == []


def test_rules_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match=r"config.memory.rule = 'recent': expected one of"):
        MemoryConfig(Named("recent"))
    with pytest.raises(ConfigError, match=r"is no rl_code\.rollout\.memory\.Rule"):
        MemoryConfig(Named("rl_code.types:root_of"))
    given = quickstart.get_config()
    given.memory = dict(rule="error_driven")
    with pytest.raises(ConfigError, match="no tool reads what is kept"):
        build(RunConfig, given)
    given.tools = ("write_file", "run_tests", "memory_recall", "submit")
    assert build(RunConfig, given).memory.found() == RULES["error_driven"]()
    given.record = dict(keep=4)
    with pytest.raises(ConfigError, match=r"the notes of memory.rule = 'error_driven' are read"):
        build(RunConfig, given)


def test_a_message_at_the_end_has_room_in_batches():
    given = quickstart.get_config()
    given.tools = ("write_file", "run_tests", "memory_recall", "submit")
    plain = build(RunConfig, given)
    given.memory = dict(rule=dict(name="summary", tokens=16))
    asked = build(RunConfig, given)
    more = asked.train.loss.constant_length - plain.train.loss.constant_length
    most = plain.limits.tokens - plain.train.loss.constant_length
    assert more == min(16, most)
