"""Episodes per second with real tools and grading, without a model.

Scripted agents play generated functions: list the files, write what is there, test it, write the
reference, test, and submit, so six calls of tools in five messages; then the work is graded in a
fresh sandbox. --threads episodes are played at once. In a last round --kill of the sandboxes are
killed, each at a request drawn at random: their episodes are built again and must end as before.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Callable

import rich.console
import rich.table
from absl import flags

from benchmarks.results import define_counts, hardware, save
from benchmarks.sandbox_kills import losing
from models.tokenizer import Tokenizer
from rl_code.config.named import Named
from rl_code.environment.episode import Episode
from rl_code.environment.finished import Rewarder
from rl_code.environment.protocols.compact import Compact
from rl_code.environment.sandbox.pool import SandboxConfig, SandboxPool
from rl_code.environment.tools.api import find_tools
from rl_code.rewards.combine import RewardConfig, SignalConfig, find_reward
from rl_code.tasks.api import find_source
from rl_code.types import Limits, Task, Trajectory

define_counts("threads", ["1", "4", "16"], "Episodes played at once, of play.")
flags.DEFINE_integer("episodes", 128, "Episodes of a round, of play.", lower_bound=1)
flags.DEFINE_float("kill", 0.05, "Share of sandboxes killed in the last round, of play.", 0, 1)

_LIMITS = Limits(turns=6, tokens=4000, turn_tokens=1000, test_runs=2, command_s=30.0)
# About as many requests as an episode makes of one of its sandboxes. A kill comes before one of
# them.
_REQUESTS = 6
_CALLS = 6


def main() -> None:
    options = flags.FLAGS
    console = rich.console.Console(width=100)
    tasks = single_files(options.episodes)
    tokenizer = Tokenizer.train(
        [text for task in tasks for text in task.reference.values()], 400, Compact.SPECIAL_TOKENS
    )
    reward = find_reward(RewardConfig((SignalConfig(Named("tests")),)))
    start = time.perf_counter()
    rounds = []
    with SandboxPool(SandboxConfig()) as pool:
        with pool.open({}) as sandbox:
            sandbox.run(["true"], timeout_s=60)
        started_s = time.perf_counter() - start

        def play(task: Task) -> Trajectory:
            return played(task, tokenizer, pool, reward)

        for threads in map(int, options.threads):
            rounds.append(timed(threads, tasks, play))
        with losing(options.kill, _REQUESTS, options.seed) as kills:
            last = timed(int(options.threads[-1]), tasks, play)
        rounds.append(last | {"killed": kills.killed})
    report = {"hardware": hardware(), "start_s": round(started_s, 3), "rounds": rounds}
    console.print(table(report))
    console.print(f"from nothing to the end of a first command: {report['start_s']} s")
    save(report)


def single_files(count: int) -> list[Task]:
    """Generated tasks whose reference is their one file."""
    settings = {"split": "train", "levels": (1, 2)}
    stream = find_source(Named("generated", settings), "tasks").load(None, None)
    found: list[Task] = []
    index = 0
    while len(found) < count:
        if set(stream[index].reference) == {stream[index].path}:
            found.append(stream[index])
        index += 1
    return found


def messages(task: Task) -> tuple[str, ...]:
    """The messages of the scripted agent."""
    write = "<|call|>write\n{}<|end|>"
    return (
        "<|call|>run\nls<|end|>",
        write.format(task.files[task.path]),
        "<|call|>test<|end|>",
        write.format(task.reference[task.path]) + "<|call|>test<|end|>",
        "<|call|>submit<|end|>",
    )


def played(task: Task, tokenizer: Tokenizer, pool: SandboxPool, reward: Rewarder) -> Trajectory:
    """A whole episode, graded."""
    episode = Episode(
        task,
        group=0,
        index=0,
        protocol=Compact(),
        tools=find_tools(),
        tokenizer=tokenizer,
        pool=pool,
        limits=_LIMITS,
        reward=reward,
    )
    with contextlib.closing(episode):
        episode.start()
        for message in messages(task):
            tokens = tokenizer.encode(message + Compact().stop_tokens[0])
            episode.step(tokens, [0.0] * len(tokens), [0] * len(tokens))
        return episode.finish()


def timed(threads: int, tasks: list[Task], play: Callable[[Task], Trajectory]) -> dict:
    """One round: how long it took, and what became of the episodes."""
    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(threads) as executor:
        trajectories = list(executor.map(play, tasks))
    seconds = time.perf_counter() - start
    return {
        "threads": threads,
        "seconds": round(seconds, 2),
        "episodes_per_s": round(len(tasks) / seconds, 2),
        "calls_per_s": round(_CALLS * len(tasks) / seconds, 1),
        "solved": sum(one.solved for one in trajectories),
        "faults": sum(one.status == "fault" for one in trajectories),
        "rebuilt": sum(one.rebuilt or 0 for one in trajectories),
        "killed": 0,
    }


def table(report: dict) -> rich.table.Table:
    """One row per round."""
    columns = ("threads", "episodes_per_s", "calls_per_s", "solved", "killed", "rebuilt", "faults")
    shown = rich.table.Table(*(name.replace("_per_s", "/s") for name in columns))
    for one in report["rounds"]:
        shown.add_row(*(str(one[name]) for name in columns))
    return shown
