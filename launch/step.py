"""The flag --step of the entry points that take one step of a run."""

from __future__ import annotations

from absl import flags

STEP = flags.DEFINE_integer(
    "step",
    None,
    "A step of the run. evaluate: of a checkpoint, the newest by default. fork, and sweep with "
    "--fork: the first step of the fork's own, by default that of the newest checkpoint. replay: "
    "the step whose trajectories are sampled again; without it the learner trains again. "
    "mismatch: the only step that is read.",
    0,
)
