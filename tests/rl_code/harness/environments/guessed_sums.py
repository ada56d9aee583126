"""A multi-turn environment of the package verifiers: the sum of two digits, with hints.

After a wrong number it says "more" or "less". The reward of a guess is 1 for the sum and less by its
distance for another number; that of an episode is the best, and less for each further guess.
"""

import random
import re

import verifiers.v1 as vf

__all__ = ["GuessedSums", "GuessedSumsEnv"]


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class GuessedSumsConfig(vf.TasksetConfig):
    # "train", or the rest of the pairs of digits
    split: str = "train"
    held_out: int = 20


class GuessedSums(vf.Taskset[SumTask, GuessedSumsConfig]):
    def load(self):
        pairs = [(a, b) for a in range(10) for b in range(10)]
        random.Random(0).shuffle(pairs)
        count = self.config.held_out
        for a, b in pairs[count:] if self.config.split == "train" else pairs[:count]:
            data = SumData(id=f"{a}+{b}", prompt=f"{a}+{b}=", answer=a + b)
            yield SumTask(data, self.config.task)


class GuessedSumsEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    # most guesses
    guesses: int = 2


class GuessedSumsEnv(vf.Env[GuessedSumsEnvConfig]):
    async def run(self, task, agents):
        best = 0.0
        answer = task.data.answer
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for guess in range(self.config.guesses):
                if segment.terminated:
                    break
                found = re.search(r"\d{1,6}", segment.last_reply)
                said = int(found.group()) if found else None
                best = max(best, worth(said, answer) * 0.8**guess)
                if said == answer or guess == self.config.guesses - 1:
                    break
                hint = "number?" if said is None else "more" if said < answer else "less"
                segment = await interaction.turn(hint)
        interaction.trace.record_reward("closeness", best)
        interaction.trace.record_metric("exact", float(best in (1.0, 0.8)))


def worth(said, answer):
    """0 for no number, 0.1 for one that is far off, up to 0.7 for the next, and 1 for the sum."""
    if said is None:
        return 0.0
    return 1.0 if said == answer else 0.1 + 0.6 * max(0.0, 1 - abs(said - answer) / 10)
