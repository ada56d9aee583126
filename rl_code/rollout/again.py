"""Samples a recorded trajectory again: the same weights at the same tokens, and the tools for real.

Equal numbers follow from two rules. The random stream of a token depends only on (key, group,
index, position). And what a row computes depends only on its own tokens, and on which version of
the weights computed each of its keys. A trajectory that one version sampled names that version.
One that several versions sampled says from which place on each of them computed the keys
(``Context.keys``); or all keys were computed again whenever the version changed.

A continuation begins with what is on record before its fork: the messages are carried out once more
in a new workspace, and sampled are only those behind it. Its first keys were prefilled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from models.transformer import Transformer
from rl_code.environment.episode import Episode
from rl_code.rollout.contexts import noted_before
from rl_code.rollout.rows import Row
from rl_code.rollout.scheduler import Scheduler
from rl_code.types import Task, Trajectory


def versions_of(trajectory: Trajectory) -> list[int]:
    """The versions of the weights that are needed to sample it again, in order."""
    found = set()
    for number, context in enumerate(trajectory.contexts):
        start = begin_of(trajectory, number)
        if start < len(context.tokens) or trajectory.fork is None:
            found |= {version for _, version in context.keys or ()}
        found |= {*context.versions[start:][context.sampled[start:]].tolist()}
    return sorted(found)


def begin_of(trajectory: Trajectory, number: int) -> int:
    """First place of a context's own tokens that a trajectory does not share with the one that it
    continues; 0 where it continues none.
    """
    lengths = () if trajectory.fork is None else trajectory.fork.lengths
    return lengths[number] if number < len(lengths) else 0


def sample_again(
    scheduler: Scheduler,
    trajectory: Trajectory,
    task: Task,
    make_episode: Callable[[Task, int, int], Episode],
    key: Sequence[int],
    models: Mapping[int, Transformer],
) -> Trajectory:
    """The trajectory as it is sampled now. Where it parts from the record, it goes on with the
    weights that it has.

    scheduler: one without groups. key: the words of the random key of its item. models: the
    sampling models of ``versions_of(trajectory)``.
    """

    def switch(rows: Sequence[Row]) -> None:
        """Loads the weights that the next dispatch of the only row needs."""
        for row in list(rows):
            number = row.context
            version = _due(trajectory, number, row.cached, len(row.tokens))
            if not row.waiting and version not in (None, scheduler.version):
                recompute = all(context.keys is None for context in trajectory.contexts)
                scheduler.load(models[version], version, recompute=recompute)
            # How far a dispatch gets depends on what is drafted, which is not on record. So it ends
            # where the record has other weights.
            row.most = 1
            most = scheduler.engine.config.dispatch_tokens
            while row.most < most and version == _due(
                trajectory, number, row.cached + row.most, len(row.tokens) + row.most
            ):
                row.most += 1

    fork = trajectory.fork
    start = trajectory.prompt_length if fork is None else fork.lengths[0]
    first = _due(trajectory, 0, 0, start)
    scheduler.load(models[first], first)
    if fork is None:
        scheduler.submit(
            task,
            lambda task, group, _: make_episode(task, group, trajectory.index),
            group=trajectory.group,
            group_size=1,
            key=key,
        )
    else:
        before = make_episode(task, trajectory.group, fork.of)
        try:
            _as_recorded(before, trajectory)
            if before.over:  # tools answered otherwise than they did, and it ended
                return before.finish()
            episode = before.fork(trajectory.index)
        finally:
            before.close()
        rows = [
            Row(context=number, **noted_before(trajectory.contexts[number], length))
            for number, length in enumerate(fork.lengths)
        ]
        scheduler.resume(episode, rows, key=key)
    scheduler.before_dispatch = switch
    finished = []
    try:
        while not finished:
            finished = scheduler.step()
    finally:
        scheduler.before_dispatch = lambda rows: None
        scheduler.abort()
    ((_, group),) = finished
    return group.all[0]


def _as_recorded(episode: Episode, trajectory: Trajectory) -> None:
    """Starts an episode and has it carry out the messages on record before the fork of a
    trajectory. Where tools answer otherwise than they did, it goes as far as the record fits.
    """
    episode.start()
    messages = {
        (turn.context, turn.start): turn for turn in trajectory.turns if turn.role == "assistant"
    }
    while not episode.over:
        context, tokens = episode.at_work
        turn = messages.get((context, len(tokens)))
        done = episode.forkable and episode.border.turn == trajectory.fork.turn
        if turn is None or done or turn.end - turn.start > episode.budget:
            return
        of = trajectory.contexts[context]
        part = slice(turn.start, turn.end)
        episode.step(*(x[part].tolist() for x in (of.tokens, of.logprobs, of.versions)))


def _due(trajectory: Trajectory, number: int, cached: int, length: int) -> int | None:
    """The version with which the dispatch was made that computed the key at place ``cached`` of the
    row of a context, which had ``length`` tokens; None where the record has no such row.
    """
    if number >= len(trajectory.contexts):
        return None
    context = trajectory.contexts[number]
    if context.keys is not None:
        return next(version for place, version in reversed(context.keys) if place <= cached)
    # Either one version computed all keys, or all were computed again by the version that sampled
    # the next token.
    own = length - context.kept
    known = 0 <= own < len(context.tokens) and context.sampled[own]
    return int(context.versions[own]) if known else None
