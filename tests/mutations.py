"""Faults that the tests must find: each breaks one line of the code, and a test of it must fail.

    python -m tests.mutations [words of a name ...]

Each fault is put into a copy of the tree, where its test runs alone. The exit code is 1 if a test
passes although the code is broken, and 2 if no name has the words. This takes minutes; run it after
tests were merged, moved or made smaller.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = (
    *("attention", "benchmarks", "cluster", "configs", "experiments", "launch", "models"),
    *("pallas_kernels", "people", "planner", "rl_code", "sweeps", "tests", "pyproject.toml"),
)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A line of the code, what breaks it, and the test that finds it."""

    name: str
    file: str
    before: str
    after: str
    # Arguments of pytest.
    test: str


FAULTS = [
    Fault(
        "damage of a checkpoint is not looked for",
        "rl_code/checkpoint/checkpoint.py",
        "            checkpoint_record.check_files(directory, record)\n",
        "",
        "tests/rl_code/checkpoint/test_checkpoint.py -k any_damaged_file",
    ),
    Fault(
        "a checkpoint counts before its arrays are on the disk",
        "rl_code/checkpoint/checkpoint.py",
        "        self._manager.wait_until_finished()\n        self._manager.check_for_errors()\n        if",
        "        if",
        "tests/rl_code/checkpoint/test_checkpoint.py",
    ),
    Fault(
        "moments of the optimizer begin anew",
        "rl_code/checkpoint/checkpoint.py",
        "            self._known.add(restored.step)\n            if broken",
        "            restored = dataclasses.replace(restored, state=jax.tree_util.tree_map_with_path(\n"
        "                lambda at, x: x * 0 if 'opt_state' in str(at) else x, restored.state))\n"
        "            self._known.add(restored.step)\n            if broken",
        "tests/rl_code/recording/test_replay_training.py -k interrupted_run",
    ),
    Fault(
        "a file has its name before its content",
        "rl_code/host/files.py",
        "        _write(aside, data, synced, private)\n        return",
        "        _write(path, data, synced, private)\n        os.link(path, aside)\n        return",
        "tests/rl_code/test_files.py",
    ),
    Fault(
        "a group is lost",
        "rl_code/schedule.py",
        "enumerate(self._draw())",
        "enumerate(self._draw()[1:])",
        "tests/rl_code/test_schedule.py -k every_planned_group",
    ),
    Fault(
        "what a dead actor holds is taken over by nobody",
        "rl_code/store/claims.py",
        "        if gone or silent_s <= self._timeout_s:",
        "        if gone or silent_s <= 1000 + self._timeout_s:",
        "tests/rl_code/store/test_claims.py -k killed_actor",
    ),
    Fault(
        "weights are a step staler than the bound",
        "rl_code/schedule.py",
        "min(version + self._config.max_staleness + 1,",
        "min(version + self._config.max_staleness + 2,",
        "tests/rl_code/test_schedule.py -k every_planned_group",
    ),
    Fault(
        "a token sees the next one",
        "pallas_kernels/tokens.py",
        "(k.order <= q.order)\n    mask &= (k.branches <= q.branches)",
        "(k.order <= q.order + 1)\n    mask &= (k.branches <= q.branches)",
        "tests/attention/test_dense.py tests/attention/test_methods.py",
    ),
    Fault(
        "a document sees others",
        "pallas_kernels/tokens.py",
        "    mask &= (k.documents == 0) | (k.documents == q.documents) | (q.documents == TAIL)\n",
        "",
        "tests/attention/test_methods.py tests/attention/test_trees_with_documents.py tests/rl_code/learner/test_documents.py",
    ),
    Fault(
        "a branch of a tree sees its sister",
        "pallas_kernels/tokens.py",
        "(k.branches <= q.branches) & (q.branches <= last)\n    mask &= (k.documents",
        "(k.branches <= q.branches)\n    mask &= (k.documents",
        "tests/rl_code/learner/test_trees.py tests/rl_code/learner/test_shared_prompt.py",
    ),
    Fault(
        "a canary that passed proves nothing",
        "rl_code/environment/suites/again.py",
        "        suspects = passed_canaries(first, drawn)\n        failed",
        "        suspects = set()\n        failed",
        "tests/rl_code/environment/test_suite_again.py -k equals_everything",
    ),
    Fault(
        "a continued run draws tasks from the beginning",
        "rl_code/train.py",
        "    return restored.state, restored.step, restored.position\n",
        "    return restored.state, restored.step, {**restored.position, 'tasks': None}\n",
        "tests/rl_code/run/test_run_with_lora.py "
        "tests/rl_code/run/test_run_with_documents.py "
        "tests/rl_code/recording/test_fork.py",
    ),
    Fault(
        "gradients are added twice over fsdp",
        "models/cut_products.py",
        '        part = jax.lax.psum_scatter(whole, "fsdp"',
        '        part = 2 * jax.lax.psum_scatter(whole, "fsdp"',
        "tests/rl_code/learner/test_fsdp.py",
    ),
    Fault(
        "gradients of experts are added twice over fsdp",
        "models/sharding.py",
        '    return jax.lax.psum_scatter(gradient, "fsdp"',
        '    return 2 * jax.lax.psum_scatter(gradient, "fsdp"',
        "tests/rl_code/learner/test_expert_parallel.py",
    ),
    Fault(
        "products of experts over tensor miss what other devices hold",
        "models/sharding.py",
        "    return jax.lax.psum(x, axes) if axes else x\n",
        "    return x\n",
        "tests/rl_code/learner/test_expert_parallel.py",
    ),
    Fault(
        "exported matrices are not transposed",
        "models/families/parameters.py",
        "array.transpose(order).reshape(self.stored_shape(array.shape))",
        "array.reshape(self.stored_shape(array.shape))",
        "tests/models/test_huggingface.py -k bit_exact",
    ),
    Fault(
        "a fork's checkpoint has its parent's position of another step",
        "rl_code/recording/fork.py",
        "config=whole, position=position, **changes)",
        "config=whole, **changes)",
        "tests/rl_code/recording/test_fork.py",
    ),
    Fault(
        "a fork has a step of its parent too few",
        "rl_code/recording/fork.py",
        "draft / STORE, step, reach,",
        "draft / STORE, step - 1, reach,",
        "tests/rl_code/recording/test_fork.py",
    ),
    Fault(
        "tokens are drawn from the other end",
        "rl_code/rollout/sampling.py",
        "(threshold - start)",
        "(threshold + start)",
        "tests/rl_code/rollout/test_sampling.py tests/rl_code/rollout/test_picks.py",
    ),
]


def main(words: list[str]) -> int:
    """Tries the faults whose names hold all of the words; returns the exit code."""
    chosen = [fault for fault in FAULTS if all(word in fault.name for word in words)]
    if not chosen:
        names = "\n  ".join(fault.name for fault in FAULTS)
        print(
            f"no fault has {' '.join(words)!r} in its name; there are\n  {names}", file=sys.stderr
        )
        return 2
    with (
        tempfile.TemporaryDirectory(prefix="mutations") as folder,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        found = list(pool.map(lambda fault: tried(fault, Path(folder)), chosen))
    print(f"{sum(found)} of {len(found)} faults found")
    return int(not all(found))


def tried(fault: Fault, folder: Path) -> bool:
    """True if the test of a fault finds it."""
    tree = Path(tempfile.mkdtemp(dir=folder))
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tree / name)
    path = tree / fault.file
    text = path.read_text()
    if text.count(fault.before) != 1:
        print(f"{fault.name}: {fault.file} has not this text once:\n{fault.before}", flush=True)
        return False
    path.write_text(text.replace(fault.before, fault.after))
    # compiled programs are keyed by what they compute, so a broken one is compiled anew
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", *fault.test.split()],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
    )
    shutil.rmtree(tree)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    last = failed[0] if failed else done.stdout.strip().splitlines()[-1]
    print(f"{'found' if done.returncode == 1 else 'NOT FOUND'}: {fault.name}: {last}", flush=True)
    return done.returncode == 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
