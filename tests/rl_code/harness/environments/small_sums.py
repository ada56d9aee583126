"""Environments of the package verifiers for tests: sums, asked once or worked out with a tool."""

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def correct(completion, answer, **kwargs) -> float:
    """1 where the last message says the sum, and 0.25 where it says another number."""
    said = (completion[-1].content or "").strip() if completion else ""
    return 1.0 if said == answer else 0.25 * said.isdigit()


class Guesses(vf.MultiTurnEnv):
    """Says after each guess whether the sum is greater or less, until it is guessed."""

    async def env_response(self, messages, state, **kwargs):
        said = (messages[-1].content or "").strip()
        if not said.isdigit():
            raise vf.ToolError(f"{said!r} is no number")
        word = "more" if int(said) < int(state["answer"]) else "less"
        return [vf.UserMessage(role="user", content=word)]

    @vf.stop
    async def guessed(self, state):
        steps = state["trajectory"]
        return bool(steps) and steps[-1]["completion"][-1].content == state["answer"]


def load_environment(kind: str = "single", rows: int = 3, held_out: int = 0):
    """kind: single, tools, guesses, group or broken."""
    print("loaded")  # which is no line of the driver's

    def sums(first: int, count: int):
        return Dataset.from_list(
            [
                {"question": f"{n} + {n + 1} = ?", "answer": str(2 * n + 1)}
                for n in range(first, first + count)
            ]
        )

    rubric = vf.Rubric(funcs=[correct])
    common = dict(
        dataset=sums(0, rows),
        eval_dataset=sums(rows, held_out) if held_out else None,
        rubric=rubric,
        system_prompt="Answer with a number.",
    )
    if kind == "tools":
        return vf.ToolEnv(tools=[add], max_turns=4, **common)
    if kind == "guesses":
        return Guesses(max_turns=-1, **common)
    if kind == "group":

        def best(completions, **kwargs) -> list[float]:
            return [1.0] * len(completions)

        rubric.add_reward_func(best)
    if kind == "broken":

        class Broken(Guesses):
            async def env_response(self, messages, state, **kwargs):
                raise vf.SandboxError("its machine is gone")

        return Broken(**common)
    return vf.SingleTurnEnv(**common)
