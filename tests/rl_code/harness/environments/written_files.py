"""A taskset of the package verifiers whose task is a file to write in the rollout's runtime."""

import verifiers.v1 as vf

__all__ = ["WrittenFiles"]

GIVEN = b"a secret of 70000 bytes\n" + b"x" * 70000


class FileTask(vf.Task[vf.TaskData]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        await runtime.write("in/given.txt", GIVEN)
        await runtime.run(["sh", "-c", "head -n 1 in/given.txt > given.txt"], {})

    @vf.reward
    async def written(self, runtime: vf.Runtime) -> float:
        return float((await runtime.read("answer.txt")).strip() == b"42")

    @vf.metric
    async def read(self, runtime: vf.Runtime) -> float:
        found = await runtime.read("in/given.txt")
        return float(len(found)) if found == GIVEN else -1.0

    @vf.metric
    async def seen(self, runtime: vf.Runtime) -> float:
        """1 where a command sees this file."""
        done = await runtime.run(["test", "-e", __file__], {})
        return float(done.exit_code == 0)


class WrittenFiles(vf.Taskset[FileTask, vf.TasksetConfig]):
    def load(self):
        yield FileTask(vf.TaskData(id="one", prompt="Write 42 to answer.txt."), self.config.task)
