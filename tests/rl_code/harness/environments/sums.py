"""A taskset of the package verifiers for tests: sums, said at once or worked out with a tool."""

import os
import re

import verifiers.v1 as vf
from adding import Adding

__all__ = ["Sums"]


class SumData(vf.TaskData):
    answer: int


class SumConfig(vf.TaskConfig):
    tools: bool = False
    # what the reward does instead: raise, exit, hang, nan
    does: str = ""


class SumTask(vf.Task[SumData, vf.State, SumConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Adding(vf.ToolsetConfig())] if config.tools else []

    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 4

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)

    @vf.reward(weight=2.0)
    async def correct(self, trace: vf.Trace) -> float:
        """1 where the last message says the sum, and 0.25 where it says another number."""
        if self.config.does == "raise":
            raise KeyError("its own bug")
        if self.config.does == "exit":
            os._exit(1)
        if self.config.does == "nan":
            return float("nan")
        said = re.search(r"\d+", trace.last_reply)
        if said is None:
            return 0.0
        return 1.0 if int(said.group()) == self.data.answer else 0.25


class SumsConfig(vf.TasksetConfig):
    rows: int = 3
    system: str | None = "Answer with a number."
    task: SumConfig = SumConfig()


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        print("loaded")  # which is no line of the driver's
        for n in range(self.config.rows):
            data = SumData(
                name=f"sum {n}",
                prompt=f"{n} + {n + 1} = ?",
                system_prompt=self.config.system,
                answer=2 * n + 1,
            )
            yield SumTask(data, self.config.task)
