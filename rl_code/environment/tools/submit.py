"""submit: hands the work in. The files as they stand are graded and the episode is over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_code.environment.tools.tool import Answer, Tool, schema
from rl_code.environment.tools.workspace import Workspace


def _run(arguments: Mapping[str, Any], workspace: Workspace) -> Answer:
    workspace.submitted = True
    return Answer("submitted")


TOOL = Tool(
    schema(
        "submit",
        "Hand in the files as they stand. Hidden tests decide, and there is no way back. Work that "
        "is never "
        "submitted earns nothing.",
        {},
        (),
    ),
    _run,
)
