"""Metrics of a training step, the usual ones and those that a user adds.

A metric of one's own is a function of the step's groups and of the learner's metrics:

    def lengths(groups: Sequence[Group], learner: Mapping[str, Any]) -> Mapping[str, float]:
        return {"lengths/longest": max(...)}

or a frozen dataclass with settings that is called in the same way. The config lists those that are
active in ``metrics.extra``. An exception of one is an outcome of the step: its numbers are left out
and METRIC_ERRORS counts it. With ``metrics.on_error="stop"`` the run ends instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from rl_code.config.read_config import ConfigError
from rl_code.learner.advantages import rewards_of
from rl_code.learner.monte_carlo import borders_of, mean_reward
from rl_code.learner.parts import summary_turns
from rl_code.learner.rounding import differ
from rl_code.metrics.values import as_number
from rl_code.rewards.combine import SIGNAL_ERROR, described
from rl_code.rewards.noted import MEASURES
from rl_code.rollout.actor import ActorStats
from rl_code.types import Group, Trajectory

# What is counted of ``Trajectory.status``; faults, which are masked, are counted apart.
_WAYS_TO_END = ("submitted", "turn_limit", "token_limit", "time_limit", "agent_ended")

type Metric = Callable[[Sequence[Group], Mapping[str, Any]], Mapping[str, Any]]


def sampled_lengths(groups: Sequence[Group], learner: Mapping[str, Any]) -> dict[str, float]:
    """Number of tokens that the policy sampled per trajectory: median, 90th percentile, most."""
    counts = [int(t.sampled.sum()) for group in groups for t in group.own]
    return {
        "lengths/sampled_p50": float(np.percentile(counts, 50)),
        "lengths/sampled_p90": float(np.percentile(counts, 90)),
        "lengths/sampled_max": float(max(counts)),
    }


def all_sampled(groups: Sequence[Group], learner: Mapping[str, Any]) -> dict[str, float]:
    """Tokens that the policy sampled for a step: for its trajectories and for what goes on from
    their turn borders.
    """
    counts = [int(t.own_sampled.sum()) for group in groups for t in group.all if not t.demonstrated]
    return {"lengths/sampled_in_all": float(sum(counts))}


@dataclasses.dataclass(frozen=True)
class ToolCalls:
    """The use of a tool, by name of the metric.

    calls/TOOL: calls of an episode. calls/TOOL_used: share of the episodes with a call.
    calls/TOOL_solved: share of these that solve their task, and calls/TOOL_unused_solved that of
    the others; no number where there are none.
    """

    # Names of tools.
    tools: tuple[str, ...]

    def __call__(self, groups: Sequence[Group], learner: Mapping[str, Any]) -> dict[str, float]:
        episodes = [trajectory for group in groups for trajectory in group.own]
        solved = np.array([one.solved for one in episodes])
        found = {}
        for tool in self.tools:
            calls = [call.name for one in episodes for turn in one.turns for call in turn.calls]
            found[f"calls/{tool}"] = calls.count(tool) / len(episodes)
            used = np.array(
                [any(c.name == tool for t in one.turns for c in t.calls) for one in episodes]
            )
            found[f"calls/{tool}_used"] = float(used.mean())
            for name, part in (("solved", used), ("unused_solved", ~used)):
                if part.any():
                    found[f"calls/{tool}_{name}"] = float(solved[part].mean())
        return found


# Those that a config may name in ``metrics.extra``. One with settings is its class.
METRICS: dict[str, Any] = {
    "sampled_lengths": sampled_lengths,
    "all_sampled": all_sampled,
    "tool_calls": ToolCalls,
}
# How many of them raised an exception in a step.
METRIC_ERRORS = "metrics/errors"


def extra_metrics(
    metrics: Collection[Metric],
    groups: Sequence[Group],
    known: Mapping[str, Any],
    *,
    stops: bool = False,
) -> dict[str, int | float]:
    """Compute the metrics of ``metrics.extra`` for a step, and count those that raised.

    known: the metrics that the step has anyway; the functions get them too. stops: True if an
    exception ends the run.

    Raises ConfigError, and what a metric raises that ends the run; ValueError where it gives no
    number, or a name that is not ``group/name`` or that the step has already.
    """
    found: dict[str, int | float] = {METRIC_ERRORS: 0.0} if metrics else {}
    for metric in metrics:
        try:
            found |= _numbers(metric, groups, known, found)
        except ConfigError:
            raise
        # a library may leave by sys.exit, too
        except (Exception, SystemExit) as raised:
            if stops:
                raise
            logging.warning("the metric %r failed: %s", metric, described(raised))
            found[METRIC_ERRORS] += 1.0
    return found


def _numbers(
    metric: Metric, groups: Sequence[Group], known: Mapping[str, Any], others: Mapping[str, Any]
) -> dict[str, int | float]:
    """The numbers of one metric. others: those of the metrics before it."""
    numbers = {}
    for name, value in metric(groups, known).items():
        if "/" not in name or name in known or name in others:
            raise ValueError(
                f"{metric!r} gives the metric {name!r}: expected a name like group/name that no "
                "other metric has"
            )
        numbers[name] = as_number(name, value)
    return numbers


def taught(metrics: Mapping[str, Any]) -> bool:
    """True if advantages or a teacher said in which direction a step should go; where nobody wrote
    that down, if rewards differed within a group.
    """
    return metrics.get("train/credited", metrics["reward/signal_groups"]) > 0


def has_signal(group: Group) -> bool:
    """True if the rewards of a group's valid trajectories differ, so that something can be learned
    from it.
    """
    rewards, valid = rewards_of(group)
    return differ(rewards[valid])


def episode_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Means over the policy's episodes of one step; version: the learner's, when they were trained
    on. Beside them the share of demonstrations that solve their task, where there are any.
    """
    trajectories = [trajectory for group in groups for trajectory in group.own]
    shown = [one for group in groups for one in group.trajectories if one.demonstrated]
    counts = [group.solved for group in groups]
    ages = np.concatenate([version - t.versions[t.sampled] for t in trajectories])
    # Of graded work. Where the visible share rises and the hidden one does not, the policy learns
    # to please the tests that it sees.
    passed = zip(*(t.passed for t in trajectories if t.passed is not None), strict=True)
    scored = [t.scores for t in trajectories if t.scores is not None]
    first_edits = [t.first_edit_passed for t in trajectories]
    summaries = [len(summary_turns(t)) for t in trajectories]

    def mean(values) -> float:
        return float(np.mean([float(value) for value in values]))

    return {
        "reward/total": mean(t.reward.total for t in trajectories),
        **{
            f"reward/{name}": mean(t.reward.components.get(name, 0.0) for t in trajectories)
            for name in sorted({name for t in trajectories for name in t.reward.components})
        },
        **{name: mean(values) for name, values in sorted(noted_measures(trajectories).items())},
        **{
            f"passed/{kind}": mean(x)
            for kind, x in zip(("visible", "hidden"), passed, strict=False)
        },
        **{
            f"scores/{name}": mean(scores[name] for scores in scored if name in scores)
            for name in sorted({name for scores in scored for name in scores})
        },
        "reward/solved": mean(t.solved for t in trajectories),
        **({"reward/demonstrated": mean(t.solved for t in shown)} if shown else {}),
        "reward/signal_errors": float(sum(SIGNAL_ERROR in t.reward.flags for t in trajectories)),
        # no mean where they are not known
        **({"reward/first_edit": mean(first_edits)} if None not in first_edits else {}),
        "reward/mixed_groups": mean(0 < good < graded for good, graded in counts),
        "reward/signal_groups": mean(map(has_signal, groups)),
        "episode/sampled_tokens": mean(t.sampled.sum() for t in trajectories),
        "episode/tokens": mean(t.num_tokens for t in trajectories),
        "episode/turns": mean(
            sum(turn.role == "assistant" for turn in t.turns) for t in trajectories
        ),
        **({"episode/summaries": mean(summaries)} if any(summaries) else {}),
        "episode/malformed_calls": mean(t.malformed_calls for t in trajectories),
        **{f"episode/{way}": mean(t.status == way for t in trajectories) for way in _WAYS_TO_END},
        "episode/faults": float(sum(t.status == "fault" for t in trajectories)),
        "episode/rebuilt": float(sum(t.rebuilt or 0 for t in trajectories)),
        "rollout/sampled_tokens": float(len(ages)),
        **{
            f"staleness/{age}": float(np.mean(ages == age))
            for age in range(int(ages.max(initial=0)) + 1)
        },
        # of all episodes of the step together; ``limits.tools_s`` bounds that of one
        "time/tools_s": sum(t.seconds.get("tools", 0.0) for t in trajectories),
        "time/grade_s": sum(t.seconds.get("grade", 0.0) for t in trajectories),
        **_fork_metrics(groups),
    }


def _fork_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of the continuations of a step; none in a run without them.

    forks/sampled_tokens: tokens that the policy sampled for them, beside rollout/sampled_tokens for
    the trajectories. forks/solved: their mean, which is that of the trajectories where values are
    right. forks/spread: the mean distance of a border's value from that of its whole group, by
    which turns differ.
    """
    found = [group for group in groups if group.continuations is not None]
    if not found:
        return {}
    continuations = [one for group in found for one in group.continuations or ()]
    graded = [one for one in continuations if one.status != "fault"]
    spreads = [
        abs(border.value - mean)
        for group in found
        if (mean := mean_reward(group)) is not None
        for index in range(len(group.trajectories))
        for border in borders_of(group, index)
    ]
    return {
        "forks/continuations": float(len(continuations)),
        "forks/sampled_tokens": float(sum(int(one.own_sampled.sum()) for one in continuations)),
        "forks/faults": float(len(continuations) - len(graded)),
        "forks/borders": float(len(spreads)),
        **({"forks/solved": float(np.mean([one.solved for one in graded]))} if graded else {}),
        **({"forks/spread": float(np.mean(spreads))} if spreads else {}),
    }


def noted_measures(trajectories: Sequence[Trajectory]) -> dict[str, list[float]]:
    """The measures that signals noted (``rewards.noted``), by the name of their metric: of the
    episodes that have them.
    """
    found: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for component, notes in (trajectory.reward.notes or {}).items():
            for name, value in notes.get(MEASURES, {}).items():
                found.setdefault(f"reward/{component}/{name}", []).append(float(value))
    return found


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Moments of a step, of time.perf_counter."""

    begin: float
    # when the step was planned, and the tasks for it were screened
    planned: float
    # when its groups were there
    sampled: float
    # when the update was made
    trained: float
    # when the new weights were published
    published: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.published - self.begin

    def metrics(self) -> dict[str, float]:
        """Seconds of the parts, and the learner's share without work."""
        return {
            "time/step_s": self.seconds,
            "time/screening_s": self.planned - self.begin,
            "time/rollout_s": self.sampled - self.planned,
            "time/update_s": self.trained - self.sampled,
            "time/publish_s": self.published - self.trained,
            "time/learner_idle": (self.sampled - self.begin) / self.seconds,
        }


def actor_metrics(stats: ActorStats | None) -> dict[str, float]:
    """Metrics of an actor's work since it was last asked; its work may belong to another step.

    engine/asked_tokens: tokens of prompts and answers over all episodes; engine/prefilled_tokens:
    those that were computed. engine/hits_*: shares of the context that were found in the cache.
    engine/document_hits: the share of the documents that had not to be encoded, with
    engine/document_hit_tokens tokens. engine/drafted_tokens: tokens that were guessed and checked,
    of which the share engine/draft_acceptance was right; engine/tokens_per_row_step: tokens that a
    row gained in a decoding step. engine/*_per_s: tokens per second of wall clock.
    engine/prompts_asked: prompts that a prefill process was asked for, of which
    engine/prompts_by_itself were prefilled here after all; engine/received_pages, _tokens and _mib
    came from it, and actor/pages_wait_s were waited for them with nothing to decode.
    engine/pages_to_host, _from_host: pages of prompts that went to the host's memory and came
    back; engine/host_tokens: the tokens of these, which were not prefilled again; engine/host_mib:
    the most there.
    """
    if stats is None:
        return {}
    rollout = stats.rollout
    needed = max(stats.rollout.needed_tokens, 1)
    seconds = max(stats.total_s, 1e-9)
    documents = {
        "engine/documents": float(rollout.documents),
        "engine/document_hits": rollout.document_hit_rate,
        "engine/document_hit_tokens": float(rollout.document_tokens_found),
    }
    drafts = {
        "engine/drafted_tokens": float(rollout.drafted_tokens),
        "engine/draft_acceptance": rollout.draft_acceptance,
        "engine/tokens_per_row_step": rollout.tokens_per_row_step,
    }
    pages = {
        "engine/prompts_asked": float(rollout.prompts_asked),
        "engine/prompts_by_itself": float(rollout.prompts_by_itself),
        "engine/received_pages": float(rollout.received_pages),
        "engine/received_tokens": float(rollout.received_tokens),
        "engine/received_mib": rollout.received_bytes / 2**20,
        "actor/pages_wait_s": rollout.pages_wait_s,
    }
    host = {
        "engine/pages_to_host": float(rollout.pages_to_host),
        "engine/pages_from_host": float(rollout.pages_from_host),
        "engine/host_tokens": float(rollout.host_tokens),
        "engine/host_mib": rollout.host_bytes / 2**20,
    }
    return {
        **(documents if rollout.documents else {}),
        **(host if rollout.pages_to_host or rollout.pages_from_host else {}),
        **(pages if rollout.prompts_asked else {}),
        **(drafts if rollout.drafted_tokens else {}),
        "engine/generated_tokens": float(rollout.sampled_tokens),
        "engine/asked_tokens": float(rollout.asked_tokens),
        "engine/prefilled_tokens": float(rollout.prefilled_tokens),
        "engine/generated_per_s": rollout.sampled_tokens / seconds,
        "engine/prefilled_per_s": rollout.prefilled_tokens / seconds,
        "engine/prefix_hit_rate": rollout.prefix_hit_rate,
        "engine/hits_groups": rollout.found_in_groups / needed,
        "engine/hits_turns": rollout.found_in_turns / needed,
        "engine/hits_tasks": rollout.found_in_tasks / needed,
        "engine/occupancy": rollout.occupancy,
        "engine/preempted": float(rollout.preempted),
        "engine/kv_mib": rollout.kv_bytes / 2**20,
        "actor/decode_s": rollout.decode_s,
        "actor/prefill_s": rollout.prefill_s,
        "actor/tool_wait_s": rollout.wait_s,
        "actor/gather_s": rollout.gather_s,
        "actor/idle_s": stats.idle_s,
        "actor/total_s": stats.total_s,
        "time/actor_idle": stats.idle_share,
        "time/actor_waits": (rollout.wait_s + rollout.gather_s) / seconds,
    }
