"""think: a step in which the model writes to itself, and nothing happens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from rl_code.environment.tools.tool import Result, Tool, Words, function_schema
from rl_code.environment.tools.workspace import Workspace


@dataclasses.dataclass(frozen=True)
class Think(Tool):
    """A scratch step without effect. Its text counts against the tokens of the turn."""

    # Most characters of a thought; a longer one is refused.
    most: int = 4000

    schema: ClassVar[Mapping[str, Any]] = function_schema(
        "think",
        "Write down a thought: what was read, what follows, what to try. It changes nothing and "
        "answers nothing.",
        {"thought": {"type": "string", "description": "The thought."}},
        ("thought",),
    )
    words: ClassVar[Words | None] = Words("think", below={"thought": "a thought"})

    def __post_init__(self) -> None:
        if self.most < 1:
            raise ValueError(f"{self.most=} must be at least 1")

    def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> Result:
        length = len(arguments["thought"])
        if length > self.most:
            return Result(f"a thought of {length} characters; at most {self.most}", ok=False)
        return Result("ok")
