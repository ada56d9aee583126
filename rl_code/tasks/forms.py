"""Forms in which a function-writing problem is put to the agent.

raw: the model continues the beginning of a file (protocol "raw_completion").
chat: one message; the answer is begun for the model inside a code fence (protocol "completion").
agent: a repository with the unfinished function; the agent edits, runs and submits (a protocol with
tools).
"""

from __future__ import annotations

import ast
from typing import Any, Literal

from rl_code.text.lines import split_lines

Form = Literal["raw", "chat", "agent"]
PATH = "solution.py"
INDENT = "    "


def present(form: Form, *, problem: str, beginning: str, answer: str) -> dict[str, Any]:
    """The fields messages, files and prefill of a Task.

    problem: the user's message. beginning: start of the file, function and docstring without a
    body; a raw prompt that ended in a newline would keep small models from writing the body, so
    trailing newlines are cut there. answer: how the chat form's code begins.
    """
    match form:
        case "raw":
            return {"messages": (), "files": {}, "prefill": beginning.rstrip("\n")}
        case "chat":
            messages = ({"role": "user", "content": problem},)
            return {
                "messages": messages,
                "files": {},
                "prefill": f"```python\n{answer}",
            }
        case "agent":
            content = (
                f"{problem}\n\nThe file {PATH} holds the unfinished function. Finish it there and "
                "call submit."
            )
            messages = ({"role": "user", "content": content},)
            return {"messages": messages, "files": {PATH: beginning}, "prefill": ""}
        case _:
            raise ValueError(f"{form=} must be one of 'raw', 'chat', 'agent'")


def signature_of(function: ast.FunctionDef) -> str:
    """The function's first line in Python's usual spacing, without decorators."""
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return f"def {function.name}({ast.unparse(function.args)}){returns}:"


def unfinished(signature: str, text: str) -> str:
    """A function with ``text`` as docstring and no body yet."""
    lines = [
        signature,
        f'{INDENT}"""',
        *(INDENT + line.strip() for line in split_lines(text.strip())),
        f'{INDENT}"""',
    ]
    return "".join(f"{line.rstrip()}\n" for line in lines)
