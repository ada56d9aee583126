"""submit: hands the work in. The files as they stand are graded and the episode is over."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from rl_code.environment.tools.tool import Result, Tool, Words, function_schema
from rl_code.environment.tools.workspace import Workspace


@dataclasses.dataclass(frozen=True)
class Submit(Tool):
    """Hands the work in. The files as they stand are graded and the episode is over."""

    schema: ClassVar[Mapping[str, Any]] = function_schema(
        "submit",
        "Hand in the files as they stand. Hidden tests decide, and there is no way back. Work that "
        "is never "
        "submitted earns nothing.",
        {},
        (),
    )
    words: ClassVar[Words | None] = Words("submit")

    def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> Result:
        workspace.hand_in()
        return Result("submitted")
