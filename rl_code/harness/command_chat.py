"""Form of the conversation of an agent whose messages have one shell command each.

Demonstrations are written by it, in the words of an episode; episodes are not, since there the
agent's own program says what is said.
"""

from __future__ import annotations

import dataclasses
import functools

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rl_code.config.read_config import ConfigError

# A config, and with it a template, may come from anybody.
_ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)


@dataclasses.dataclass(frozen=True)
class CommandChat:
    """The conversation of mini-swe-agent where it reads commands from the text of messages."""

    # Templates of jinja2: the system message, what the user asks (with the variable ``task``), and
    # what is answered to a command (``output.output``, ``output.returncode``).
    system: str
    instance: str
    observation: str
    # What the block of a command begins with, behind its three backticks.
    fence: str = "mswea_bash_command"
    # The command that hands the work in.
    hands_in: str = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

    def opening(self, task: str) -> tuple[tuple[str, str], ...]:
        """The messages before the agent's first one: (role, content) of each. task: in words."""
        return (
            ("system", _render(self.system, task=task)),
            ("user", _render(self.instance, task=task)),
        )

    def message(self, thought: str, command: str) -> str:
        """A message of the agent's. thought: "" for none."""
        block = f"```{self.fence}\n{command}\n```"
        return f"{thought}\n{block}" if thought else block

    def answer(self, output: str, returncode: int) -> str:
        """Text of the user's message behind a command. output: what it printed."""
        return _render(
            self.observation,
            output={"output": output, "returncode": returncode, "exception_info": ""},
        )


def _render(template: str, **variables: object) -> str:
    """As the package renders its templates. Raises ConfigError for one that asks for other
    variables, or for what a template must not reach.
    """
    try:
        return _compiled(template).render(**variables)
    except jinja2.TemplateError as error:
        raise ConfigError(f"a template of the harness, {template[:80]!r}: {error}") from error


@functools.cache
def _compiled(template: str) -> jinja2.Template:
    return _ENVIRONMENT.from_string(template)
