"""ask: a question to the person whose task it is.

Where a person is simulated, the task knows the answer (``task.meta["answer"]``): what is meant. A
task without one has nobody to ask, and says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from rl_code.environment.tools.tool import Result, Tool, Words, function_schema
from rl_code.environment.tools.workspace import Workspace

# The key of ``task.meta`` with what a simulated person says when asked.
ANSWER = "answer"


@dataclasses.dataclass(frozen=True)
class Ask(Tool):
    """Asks the person what is meant. It uses up a message, and changes nothing."""

    schema: ClassVar[Mapping[str, Any]] = function_schema(
        "ask",
        "Ask the person what is meant, where the task can be read in several ways. It costs the "
        "person's time.",
        {"question": {"type": "string", "description": "What is unclear, in one sentence."}},
        (),
    )
    # Small models ask without words: the person says again what is meant.
    words: ClassVar[Words | None] = Words("ask")

    def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> Result:
        answer = workspace.task.meta.get(ANSWER)
        if answer is None:
            return Result("nobody is there to answer", ok=False)
        return Result(answer)
