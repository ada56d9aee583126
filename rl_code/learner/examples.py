"""Chooses which trajectories of a group are trained on, and which of their tokens are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from rl_code.environment.documents import (
    OUTSIDE,
    PADDING,
    DocumentsConfig,
    check_layout,
    rope_positions,
    seen_as,
)
from rl_code.learner.advantages import Credit
from rl_code.learner.parts import trained
from rl_code.types import Context, Group, Trajectory, whole_of


@dataclasses.dataclass(frozen=True)
class Example:
    """A trajectory to train on."""

    # Without the padding of documents, which no token sees. Lengths and indices below count what is
    # left.
    trajectory: Trajectory
    # The number of the trajectory in the batch.
    number: int
    # float32, [] for the whole trajectory, or [n] for each of its n sampled tokens.
    advantage: np.ndarray
    # For each context: the indices of the sampled tokens among its own tokens.
    sampled: tuple[np.ndarray, ...]
    # For each context: how many tokens of the whole context are read. These are the tokens before
    # its last sampled token, and those that are kept by contexts which continue it. Nothing is
    # predicted from the rest.
    read: tuple[int, ...]
    # For each context, what a row holds of its own tokens: token ids, int32 [n]; with documents
    # int32 [n, 4], token ids and the fields ``documents``, ``positions`` and ``order`` of a Batch.
    own: tuple[np.ndarray, ...]

    @classmethod
    def of(
        cls,
        trajectory: Trajectory,
        number: int,
        advantage: Credit,
        documents: DocumentsConfig | None,
    ) -> Example:
        """The example of a trajectory whose tree is sound."""
        if documents is None:
            own = tuple(context.tokens for context in trajectory.contexts)
        else:
            trajectory, own = _without_padding(trajectory, documents)
        contexts = trajectory.contexts
        sampled = tuple(np.flatnonzero(context.sampled) for context in contexts)
        # The last sampled token itself is not read: no token after it is predicted.
        read = [
            context.kept + int(own_sampled[-1]) if own_sampled.size else 0
            for context, own_sampled in zip(contexts, sampled, strict=True)
        ]
        # A context stands after its parent. In reverse order, what the children read is known when
        # their parent is reached.
        for index in reversed(range(len(contexts))):
            parent = contexts[index].parent
            if parent >= 0:
                read[parent] = max(read[parent], min(read[index], contexts[index].kept))
        advantage = np.asarray(advantage, np.float32)
        return cls(trajectory, number, advantage, sampled, tuple(read), own)

    def whole(self, index: int) -> np.ndarray:
        """Part of the whole context ``index`` that a row holds, as ``own``."""
        return whole_of(self.trajectory.contexts, self.own, index)

    @property
    def targets(self) -> int:
        """Sampled tokens of all contexts."""
        return sum(len(own) for own in self.sampled)

    @property
    def unshared(self) -> int:
        """Tokens that would be read if every context with sampled tokens stood alone."""
        return sum(
            context.kept + int(own[-1])
            for context, own in zip(self.trajectory.contexts, self.sampled, strict=True)
            if own.size
        )


def examples_of(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[Credit]],
    *,
    drop_uninformative: bool,
    max_staleness: Sequence[int],
    version: int,
    documents: DocumentsConfig | None = None,
    untrained: Sequence[str] = (),
) -> tuple[list[list[Example]], int, dict[str, float]]:
    """Returns the examples of each group, the number of all trajectories, and metrics of the
    trajectories that are left out.

    max_staleness: of each group. The other arguments and the errors are those of ``batching.pack``
    and ``PackConfig``.
    """
    if len(advantages) != len(groups):
        raise ValueError(f"{len(groups)} groups but advantages for {len(advantages)}")
    chosen: list[list[Example]] = []
    counts = {"pack/faults": 0, "pack/empty": 0, "pack/uninformative": 0}
    number = 0
    for group, values, oldest in zip(groups, advantages, max_staleness, strict=True):
        size = len(group.trajectories)
        examples: list[Example] = []
        if len(values) != size:
            raise ValueError(
                f"task {group.task.id!r}: {size} trajectories but {len(values)} advantages"
            )
        chosen.append(examples)
        if drop_uninformative and not any(np.any(value) for value in values):
            counts["pack/uninformative"] += size
            number += size
            continue
        for trajectory, advantage in zip(group.trajectories, values, strict=True):
            if untrained:
                trajectory, advantage = trained(trajectory, advantage, untrained)
            if trajectory.status == "fault":
                counts["pack/faults"] += 1
            elif not any(context.sampled.any() for context in trajectory.contexts):
                counts["pack/empty"] += 1
            else:
                _check_contexts(trajectory)
                _check_documents(trajectory, documents)
                example = Example.of(trajectory, number, advantage, documents)
                examples.append(example)
                _check(example, examples[0], oldest, version)
            number += 1
    return chosen, number, {name: float(count) for name, count in counts.items()}


def _check_contexts(t: Trajectory) -> None:
    """Raises ValueError for contexts that are no tree."""
    whole: list[int] = []
    for index, context in enumerate(t.contexts):
        name = _name(t, index)
        lengths = {
            field: len(getattr(context, field))
            for field in ("tokens", "sampled", "logprobs", "versions")
        }
        if len(set(lengths.values())) != 1:
            raise ValueError(f"{name}: lengths differ: {lengths}")
        _check_parent(context, index, whole, name)
        if context.kept == 0 and context.sampled[:1].any():
            raise ValueError(f"{name}: its first token is sampled, and nothing stands before it")
        whole.append(context.kept + len(context.tokens))


def _check_documents(t: Trajectory, config: DocumentsConfig | None) -> None:
    """Raises ValueError for documents that do not agree with the config or with the rule."""
    for index, context in enumerate(t.contexts):
        name = _name(t, index)
        if config is None:
            if context.documents is not None:
                raise ValueError(f"{name}: it has documents, and the config has no such section")
            continue
        if context.documents is None or len(context.documents) != len(context.tokens):
            raise ValueError(
                f"{name}: it says of {np.size(context.documents)} of {len(context.tokens)} tokens "
                "what they are; the config has documents, so every token must have its kind"
            )
        whole = t.whole_documents(index)
        # a sampled token and the one that it is predicted from, which sees all before it
        at = context.kept + np.flatnonzero(context.sampled)
        if np.any(whole[at] != OUTSIDE) or np.any(whole[at - 1] != OUTSIDE):
            raise ValueError(
                f"{name}: a sampled token stands in a document or in padding, or right behind one"
            )
        try:
            check_layout(whole, config)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


def _without_padding(
    t: Trajectory, config: DocumentsConfig
) -> tuple[Trajectory, tuple[np.ndarray, ...]]:
    """The trajectory without the padding of its documents, and ``Example.own``."""
    contexts = []
    rows = []
    for index, context in enumerate(t.contexts):
        whole = t.whole_documents(index)
        real = whole != PADDING
        _, seen = seen_as(whole)
        fields = [seen, rope_positions(whole, config.longest), np.arange(len(whole))]
        # the places of what is kept of the parent stand before the context's own
        own = [field[context.kept :] for field in fields]
        keep = real[context.kept :]
        columns = np.stack([context.tokens, *own], axis=1).astype(np.int32)
        rows.append(columns[keep])
        names = ("tokens", "sampled", "logprobs", "versions", "documents")
        changes = {name: getattr(context, name)[keep] for name in names}
        kept = int(np.sum(real[: context.kept]))
        contexts.append(dataclasses.replace(context, kept=kept, **changes))
    prompt = int(np.sum(t.contexts[0].documents[: t.prompt_length] != PADDING))
    return dataclasses.replace(t, contexts=tuple(contexts), prompt_length=prompt), tuple(rows)


def _check_parent(context: Context, index: int, whole: Sequence[int], name: str) -> None:
    """whole: tokens of the whole contexts before this one."""
    parent = context.parent
    if not -1 <= parent < index:
        raise ValueError(f"{name}: {parent=} must be -1 or an earlier context")
    most = whole[parent] if parent >= 0 else 0
    if not 0 <= context.kept <= most:
        raise ValueError(f"{name}: kept={context.kept} must be in [0, {most}], with {parent=}")


def _check(example: Example, first: Example, max_staleness: int, version: int) -> None:
    """Raises ValueError for a trajectory that must not be trained on; ``first`` is its group's
    first to train on.
    """
    t = example.trajectory
    name = _name(t)
    tokens = t.contexts[0].tokens
    first_sampled = int(example.sampled[0][0]) if example.sampled[0].size else len(tokens)
    if not 1 <= t.prompt_length <= first_sampled:
        raise ValueError(
            f"{name}: prompt_length={t.prompt_length}, but the first sampled token is at "
            f"{first_sampled}"
        )
    shared = slice(0, t.prompt_length)
    if t.prompt_length != first.trajectory.prompt_length or not np.array_equal(
        example.own[0][shared], first.own[0][shared]
    ):
        raise ValueError(f"{name}: its prompt of {t.prompt_length} tokens is not that of its group")
    if example.advantage.shape not in ((), (example.targets,)):
        raise ValueError(
            f"{name}: advantages of shape {example.advantage.shape} for {example.targets} sampled "
            "tokens; one number or one for each is right"
        )
    where = t.sampled
    if not np.isfinite(t.logprobs[where]).all() or not np.isfinite(example.advantage).all():
        raise ValueError(
            f"{name}: a log-probability or the advantage ({example.advantage}) is not finite"
        )
    ages = version - t.versions[where]
    if ages.min() < 0 or ages.max() > max_staleness:
        raise ValueError(
            f"{name}: tokens are {ages.min()} to {ages.max()} versions old at version {version}; "
            f"allowed is 0 to {max_staleness}"
        )


def _name(t: Trajectory, context: int = 0) -> str:
    """Name in messages of a trajectory, or one of its later contexts."""
    name = f"task {t.task_id!r} trajectory {t.index}"
    return f"{name} context {context}" if context else name
