"""Words as feedback against rewards alone, from the same warm start, 3 seeds each (2601.20802).

What: the quickstart with a teacher. The teacher is the moving average of the weights, and reads
  beside the task what solved it in a sibling of the group, or, with :failed_tests, which tests the
  episode itself failed (2602.02482). Two in five tasks of the warm start tell that too, since an
  agent from scratch makes nothing of such a text otherwise.
  Variants: GRPO, GRPO with the teacher, the teacher alone.
Command: python -m launch.sweep --config=configs/self_distillation.py --workdir=runs/feedback
Hardware: 2 CPU cores. Run time: docs/results/self_distillation.md.
Expected metric: held-out pass@1 of GRPO in two thirds of its episodes. It is not reached in one
  seed: 50.3 % before RL, then 67.7 % with GRPO, 57.6 % with both, 52.6 % with the teacher alone;
  with :failed_tests 49.2, 69.8, 66.9 and 53.6 %
"""

from collections.abc import Iterator

import ml_collections

from configs import quickstart


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """The variant with rewards and a teacher. arg: "", "failed_tests" or "smoke" (seconds)."""
    if arg not in ("", "failed_tests", "smoke"):
        raise ValueError(
            f"configs/self_distillation.py:{arg}: expected nothing, failed_tests or smoke"
        )
    feedback = arg if arg == "failed_tests" else "solved_sibling"
    config = quickstart.get_config("smoke" if arg == "smoke" else "")
    with config.unlocked(), config.ignore_type():
        # the agent is from scratch, and has to learn what feedback is
        config.sft.tasks = dict(
            name="experiments.self_distillation.source:Told",
            of=config.tasks.to_dict(),
            test_runs=config.limits.test_runs,
            tells=feedback,
        )
        config.train.teacher = dict(
            average=0.95,
            feedback=feedback,
            feedback_tokens=128,
            divergence="full",
            # a few tokens on which the teacher is sure must not outweigh the others
            clip=2.0,
            rewards=1.0,
        )
        # a group of equal rewards teaches too
        config.train.pack.drop_uninformative = False
        # how soon it goes is what is asked, and not where it ends
        config.evaluate = dict(every=1 if arg == "smoke" else 6)
    config.suites = config.suites[:1]
    if arg != "smoke":
        config.train.update(steps=36)
        config.suites[0].update(count=96, samples=4)
    # as fine as the evaluations
    config.checkpoint.update(every=config.evaluate.every)
    return config


def get_sweep(arg: str = "") -> Iterator[dict]:
    """One set of overrides per run; all variants of a seed before the next seed."""
    variants = {
        # the teacher is asked, and nothing is learned from it
        "grpo": {"train.teacher.coef": 0.0},
        "both": {},
        "teacher": {"train.teacher.rewards": 0.0},
    }
    for seed in (0,) if arg == "smoke" else (0, 1, 2):
        for name, teacher in variants.items():
            yield {"variant": name, "seed": seed, **teacher}


def get_figure(arg: str = "") -> tuple[tuple, ...]:
    """Panels of the figure."""
    return (
        ("curve", "reward/solved", "step", 5),
        ("curve", "teacher/divergence", "step", 5),
        ("curve", "policy/entropy", "step", 5),
    )
