"""What of a group's trajectories is trained on, and how a completion is written into a row of a
Batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from rl_code.learner.advantages import Credit
from rl_code.types import Batch, Group, Trajectory


@dataclasses.dataclass(frozen=True)
class Completion:
    """A trajectory's part after the prompt, as it goes into a row; sequence: its number in the
    batch.
    """

    trajectory: Trajectory
    sequence: int
    # float32, one for the whole trajectory or one for each of its sampled tokens
    advantage: np.ndarray
    indices: np.ndarray  # of the sampled tokens in the trajectory

    @property
    def slots(self) -> int:
        return int(self.indices[-1]) - self.trajectory.prompt_length


def completions_of(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[Credit]],
    *,
    drop_uninformative: bool,
    max_staleness: int,
    version: int,
) -> tuple[list[list[Completion]], int, dict[str, float]]:
    """(what is trained on, by group, how many trajectories there are, metrics of those that are
    left out).

    Arguments and errors as of ``batching.pack`` and ``PackConfig``.
    """
    if len(advantages) != len(groups):
        raise ValueError(f"{len(groups)} groups but advantages for {len(advantages)}")
    members: list[list[Completion]] = []
    counts = {"pack/faults": 0, "pack/empty": 0, "pack/uninformative": 0}
    sequence = 0
    for group, values in zip(groups, advantages, strict=True):
        size = len(group.trajectories)
        completions = []
        if len(values) != size:
            raise ValueError(
                f"task {group.task.id!r}: {size} trajectories but {len(values)} advantages"
            )
        members.append(completions)
        if drop_uninformative and not any(np.any(value) for value in values):
            counts["pack/uninformative"] += size
            sequence += size
            continue
        for trajectory, advantage in zip(group.trajectories, values, strict=True):
            indices = np.flatnonzero(trajectory.sampled)
            if trajectory.status == "fault":
                counts["pack/faults"] += 1
            elif indices.size == 0:
                counts["pack/empty"] += 1
            else:
                completion = Completion(
                    trajectory, sequence, np.asarray(advantage, np.float32), indices
                )
                completions.append(completion)
                _check(completion, completions[0].trajectory, max_staleness, version)
            sequence += 1
    return members, sequence, {name: float(count) for name, count in counts.items()}


def _check(completion: Completion, first: Trajectory, max_staleness: int, version: int) -> None:
    """Raises ValueError for a trajectory that must not be trained on; ``first`` is its group's
    first to train on.
    """
    t = completion.trajectory
    indices = completion.indices
    if len(t.contexts) != 1:
        raise ValueError(f"task {t.task_id!r} trajectory {t.index}: {len(t.contexts)} contexts")
    name = f"task {t.task_id!r} trajectory {t.index}"
    lengths = {
        field: len(getattr(t.contexts[0], field))
        for field in ("tokens", "sampled", "logprobs", "versions")
    }
    if len(set(lengths.values())) != 1:
        raise ValueError(f"{name}: lengths differ: {lengths}")
    if not 1 <= t.prompt_length <= indices[0]:
        raise ValueError(
            f"{name}: prompt_length={t.prompt_length}, but the first sampled token is at "
            f"{indices[0]}"
        )
    shared = slice(0, t.prompt_length)
    if t.prompt_length != first.prompt_length or not np.array_equal(
        t.tokens[shared], first.tokens[shared]
    ):
        raise ValueError(f"{name}: its prompt of {t.prompt_length} tokens is not that of its group")
    if completion.advantage.shape not in ((), indices.shape):
        raise ValueError(
            f"{name}: advantages of shape {completion.advantage.shape} for {len(indices)} sampled "
            "tokens; one number or one for each is right"
        )
    if not np.isfinite(t.logprobs[indices]).all() or not np.isfinite(completion.advantage).all():
        raise ValueError(
            f"{name}: a log-probability or the advantage ({completion.advantage}) is not finite"
        )
    ages = version - t.versions[indices]
    if ages.min() < 0 or ages.max() > max_staleness:
        raise ValueError(
            f"{name}: tokens are {ages.min()} to {ages.max()} versions old at version {version}; "
            f"allowed is 0 to {max_staleness}"
        )


@dataclasses.dataclass
class RowWriter:
    """Fills row ``index`` of a batch of numpy arrays in place, from ``slot`` and ``target`` on.

    align: slots are left empty so that whatever comes next starts at a multiple of it.
    """

    batch: Batch
    index: int
    align: int
    slot: int = 0
    target: int = 0

    def write(self, tokens: np.ndarray, position: int, segment: int, branch: int) -> None:
        """Consecutive tokens of one branch, the first at ``position``."""
        span = (self.index, slice(self.slot, self.slot + len(tokens)))
        self.batch.tokens[span] = tokens
        self.batch.positions[span] = np.arange(position, position + len(tokens))
        self.batch.segments[span] = segment
        self.batch.branches[span] = branch
        self.slot += -(-len(tokens) // self.align) * self.align

    def write_completion(
        self,
        completion: Completion,
        segment: int,
        branch: int,
        version: int,
        *,
        first: int,
        prompt_slot: int = 0,
    ) -> None:
        """A completion from token ``first`` of its trajectory on, and its targets.

        prompt_slot: where the tokens before ``first`` start; of no importance where no target is
        predicted from them.
        """
        batch = self.batch
        t = completion.trajectory
        indices = completion.indices
        span = (self.index, slice(self.target, self.target + len(indices)))
        before = indices - 1  # index in the trajectory of the token each target is predicted from
        batch.sources[span] = np.where(before < first, prompt_slot, self.slot - first) + before
        batch.targets[span] = t.tokens[indices]
        batch.logprobs[span] = t.logprobs[indices]
        batch.advantages[span] = completion.advantage
        batch.mask[span] = 1.0
        batch.trajectories[span] = completion.sequence
        batch.lengths[span] = len(indices)
        batch.staleness[span] = version - t.versions[indices]
        self.target += len(indices)
        self.write(t.tokens[first : indices[-1]], first, segment, branch)
