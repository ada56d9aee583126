"""Message graphs of the package verifiers (version 0.4): tokens, branches, rewards.

A line is an episode with its ``traces``, or one trace. A trace has ``nodes``, each a message with
its ``parent`` and the tokens that it adds: ``token_ids``; ``mask``, true where the policy sampled;
``logprobs`` and, where a trainer has noted them, ``trainer_logprobs`` of the sampled tokens alone.
A path from a root to a leaf is a branch. Nodes of evaluations through a chat API have no tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl_code.foreign.dump import Branch, Episode, Span
from rl_code.foreign.messages import messages_of, span_of, text_of
from rl_code.foreign.reading import (
    Words,
    array_of,
    digest,
    number_of,
    wrong,
)

# Versions of the schema that are read.
VERSIONS = (1,)
_MOST_NODES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Trace:
    """One trace of a line, and what its episode says beside it."""

    # File and line.
    place: object
    content: Mapping[str, Any]
    # The episode without its traces; empty for a line that is a trace.
    episode: Mapping[str, Any]

    @property
    def id(self) -> str:
        """Its id in the run; a text that no other trace has."""
        return str(self.content.get("id") or self.place)

    @property
    def info(self) -> Mapping[str, Any]:
        """Notes that the run wrote of it."""
        return section(self.content, "info")

    @property
    def agent(self) -> str:
        """Name of the agent in its environment."""
        return str(section(self.content, "agent").get("name") or "agent")

    @property
    def task(self) -> Mapping[str, Any]:
        """The row that it solves."""
        return section(section(self.content, "task"), "data")

    @property
    def environment(self) -> str:
        """Name of the environment; "" where the line does not say it."""
        found = section(self.episode, "env")
        return str(found.get("name") or found.get("id") or "")

    def task_id(self) -> str:
        """The task in words that are the same in every run on it."""
        data = self.task
        own = data.get("id") or data.get("name")
        if own is None and data.get("idx") is not None:
            own = data["idx"]
        kind = self.environment or str(section(self.content, "task").get("type") or "task")
        # rows of two task sets may have one id
        words = f"{kind}/{'' if own is None else str(own)[:80] + '-'}{digest(dict(data))}"
        return words if self.agent == "agent" else f"{words}/{self.agent}"

    def group(self) -> str:
        """Words that traces of one group share."""
        of_run = section(self.episode, "group").get("id")
        return f"{of_run or ''}/{self.task_id()}"

    def messages(self) -> tuple[Mapping[str, Any], ...]:
        """Chat messages of the task."""
        data = self.task
        prompt = data.get("prompt")
        found: list[Mapping[str, Any]] = []
        if isinstance(system := data.get("system_prompt"), str):
            found.append({"role": "system", "content": system})
        if isinstance(prompt, str):
            found.append({"role": "user", "content": prompt})
        elif prompt is not None:
            found += messages_of(self.place, "task.data.prompt", prompt)
        return tuple(found)

    def meta(self) -> Mapping[str, Any]:
        """The row without its prompt."""
        return {key: value for key, value in self.task.items() if key != "prompt"}


def section(value: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object inside of another one; empty where there is none."""
    found = value.get(key)
    return found if isinstance(found, dict) else {}


def traces_of(place: object, row: Mapping[str, Any]) -> list[Trace]:
    """The traces of a line. Raises DumpError for one that is neither an episode nor a trace."""
    if isinstance(row.get("traces"), list):
        rest = {key: value for key, value in row.items() if key != "traces"}
        found = [Trace(place, content, rest) for content in row["traces"]]
    elif "nodes" in row:
        found = [Trace(place, row, {})]
    else:
        has = Words(f"the keys {', '.join(row) or 'none'}")
        return wrong(place, "", "an episode with traces, or a trace with nodes", has)
    for trace in found:
        if not isinstance(trace.content, dict) or not isinstance(trace.content.get("nodes"), list):
            wrong(place, "nodes", "a list", trace.content)
        version = trace.content.get("version", 1)
        if version not in VERSIONS:
            wrong(place, "version", f"a schema among {VERSIONS}", version)
    return found


def episode_of(trace: Trace, trainer: Mapping[int, np.ndarray] | None = None) -> Episode:
    """The trace as an episode.

    trainer: node -> the trainer's log-probabilities of its sampled tokens, noted elsewhere; they
    stand in for those of the node. Raises DumpError.
    """
    nodes = trace.content["nodes"]
    place = trace.place
    if len(nodes) > _MOST_NODES:
        wrong(place, "nodes", f"at most {_MOST_NODES:,} nodes", Words(f"{len(nodes):,}"))
    parents = parents_of(place, nodes)
    spans: list[Span] = []
    answered: list[bool] = []  # whether something was sampled before a node or in it
    for number, node in enumerate(nodes):
        parent = parents[number]
        before = parent >= 0 and answered[parent]
        sampled = node.get("sampled") is True
        answered.append(before or sampled)
        noted = (trainer or {}).get(number)
        spans.append(_span(f"{place}, node {number}", node, sampled, before, noted))
    rewards = _numbers(place, "rewards", trace.content.get("rewards"), weighted=True)
    return Episode(
        tuple(_branches(parents, spans)),
        sum(rewards.values()) if rewards else math.nan,
        rewards,
        flags=_flags(trace),
        status=str(trace.content.get("stop_condition") or "not recorded"),
        scores=_numbers(place, "metrics", trace.content.get("metrics"), weighted=False),
        notes={"trace": trace.id, "info": dict(trace.info)},
        version=_version(trace),
        place=str(place),
    )


def parents_of(place: object, nodes: Sequence[Any]) -> list[int]:
    """The parent of each node, which stands before it; -1 for a root. Raises DumpError."""
    found = []
    for number, node in enumerate(nodes):
        if not isinstance(node, dict):
            wrong(place, f"nodes[{number}]", "an object", node)
        parent = node.get("parent")
        if parent is not None and (type(parent) is not int or not 0 <= parent < number):
            wrong(place, f"nodes[{number}].parent", "the number of an earlier node", parent)
        found.append(-1 if parent is None else parent)
    return found


def paths_of(parents: Sequence[int]) -> list[list[int]]:
    """The nodes of each branch from its root on, in the order of the leaves."""
    inner = set(parents)
    found = []
    for leaf in range(len(parents)):
        if leaf not in inner:
            path = [leaf]
            while parents[path[-1]] >= 0:
                path.append(parents[path[-1]])
            found.append(path[::-1])
    return found


def _branches(parents: Sequence[int], spans: Sequence[Span]) -> list[Branch]:
    """A branch for each leaf, with the nodes that no branch before it has."""
    if not spans:
        return [Branch(())]
    home: dict[int, int] = {}  # node -> the branch that has it as its own
    found = []
    for path in paths_of(parents):
        kept = sum(node in home for node in path)  # they stand at the beginning
        parent = home[path[kept - 1]] if kept else -1
        home |= dict.fromkeys(path[kept:], len(found))
        found.append(Branch(tuple(spans[node] for node in path[kept:]), parent, kept))
    return found


def _span(
    place: str, node: Mapping[str, Any], sampled: bool, before: bool, noted: np.ndarray | None
) -> Span:
    message = messages_of(place, "message", [node.get("message")])[0]
    if sampled or before:
        span = span_of(place, "message", message, sampled)
    else:
        span = Span("prompt", text_of(place, "message", message))
    ids = array_of(place, "token_ids", node.get("token_ids") or [], "iu", np.int32)
    mask = array_of(place, "mask", node.get("mask") or [], "b", np.bool_)
    if len(mask) != len(ids):
        wrong(place, "mask", f"{len(ids)} values, as token_ids has", Words(f"{len(mask)}"))
    if mask.any() and not sampled:
        wrong(place, "mask", "no sampled token in a message that was not sampled", Words("one"))
    if not len(ids):
        return span
    trainer = noted
    if trainer is None and node.get("trainer_logprobs") is not None:
        trainer = _compact(place, "trainer_logprobs", node["trainer_logprobs"], mask)
    return dataclasses.replace(
        span,
        ids=ids,
        sampled=mask,
        logprobs=_spread(_compact(place, "logprobs", node.get("logprobs"), mask), mask),
        trainer_logprobs=None if trainer is None else _spread(trainer, mask),
    )


def _compact(place: str, field: str, values: Any, mask: np.ndarray) -> np.ndarray:
    """float32, a value for each sampled token; NaN where the dump has none."""
    count = int(mask.sum())
    if not values:
        return np.full(count, np.nan, np.float32)
    found = array_of(place, field, values, "if", np.float32)
    if len(found) != count:
        wrong(place, field, f"{count} values, one for each sampled token", Words(f"{len(found)}"))
    return found


def _spread(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """float32 [T], the values at the sampled tokens, 0 at the others."""
    found = np.zeros(len(mask), np.float32)
    found[mask] = values
    return found


def _numbers(place: object, field: str, values: Any, weighted: bool) -> dict[str, float]:
    """Rewards or metrics by name, without those that are null."""
    if values is None:
        return {}
    if not isinstance(values, dict):
        wrong(place, field, "an object", values)
    found = {}
    for name, value in values.items():
        if value is None:
            continue
        at = f"{field}.{name}"
        if not weighted:
            found[name] = number_of(place, at, value)
            continue
        if not isinstance(value, dict):
            wrong(place, at, "an object with a score", value)
        weight = number_of(place, f"{at}.weight", value.get("weight", 1.0))
        found[name] = weight * number_of(place, f"{at}.score", value.get("score"))
    return found if weighted else {name: x for name, x in found.items() if math.isfinite(x)}


def _flags(trace: Trace) -> tuple[str, ...]:
    """Errors of an episode, in the package's words."""
    errors = trace.content.get("errors")
    kinds = [
        str(error.get("type"))[:80]
        for error in (errors if isinstance(errors, list) else ())
        if isinstance(error, dict)
    ]
    found = [f"error {kind}" for kind in dict.fromkeys(kinds)]
    if trace.content.get("is_timeout") is True:
        found.append("timeout")
    return tuple(found)


def _version(trace: Trace) -> int | None:
    """The version of the weights that sampled all of it, where the run says one."""
    policy = section(section(section(trace.episode, "run"), "work"), "policy")
    start = policy.get("start")
    same = type(start) is int and start == policy.get("end") and 0 <= start < 1 << 31
    return start if same else None
