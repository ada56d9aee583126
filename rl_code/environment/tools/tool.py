"""Base class of tools, and the check of a call's arguments against a tool's schema."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from models.marks import encodable
from rl_code.environment.tools.schema import TYPES, Arguments, unknown_types
from rl_code.environment.tools.text import one_line
from rl_code.environment.tools.workspace import Workspace

_LARGEST = 1 << 63
# Depth to which an argument may be nested, and most values that it may have.
_DEEPEST = 32
_MOST_VALUES = 10_000


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of a call, for the model to read."""

    content: str
    # False when it could not do what was asked.
    ok: bool = True


@dataclasses.dataclass(frozen=True)
class Words:
    """Form of a tool's call in the compact protocol: a word, arguments on the same line, and
    arguments on the lines below.

    A required argument ``path`` that stands in neither place is the task's own file.
    """

    # The word that begins the call.
    word: str
    # The arguments on the same line; the last ones may be left out. Name -> what the argument is,
    # in a few words for the model.
    line: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # The arguments below, with a line ``=====`` between them. Name -> what the argument is.
    below: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Delegation(NamedTuple):
    """Limits of a sub-agent's context."""

    # Messages of the assistant, and tokens of the context.
    turns: int
    tokens: int


class Tool:
    """One tool. A frozen dataclass: its fields are the settings that a config gives.

    A tool of one's own is such a class (or an instance) anywhere on Python's path, which a config
    names as ``package.module:object``.
    """

    # The function schema that is shown to the model (OpenAI's form, the value of "function").
    schema: ClassVar[Mapping[str, Any]]
    # True if the purpose of a call is to change a file. The files after the first such call that
    # succeeds are also graded on their own.
    edits: ClassVar[bool] = False
    # True if a call runs commands, which may change files as a side effect.
    runs_commands: ClassVar[bool] = False
    # True if the result of a call is a document where the config has documents: a text that stands
    # for itself, as a file does. Its tokens are then encoded without seeing the rest of the context
    # (``rl_code.environment.documents``), and once for all episodes that read the same.
    documents: ClassVar[bool] = False
    # True if a call changes the notes that later episodes read (``environment.notes``).
    notes: ClassVar[bool] = False
    # Form of a call in the compact protocol; None for the tool's name with the integers on its line
    # and the texts below.
    words: ClassVar[Words | None] = None

    def run(self, arguments: Mapping[str, Any], workspace: Workspace) -> Result:
        """Does the work. The arguments have been checked against the schema.

        The result is in sentences if ``workspace.verbose``, and otherwise as short as possible. A
        model can provoke OSError and ValueError, which become a result. Any other exception is a
        bug and ends the run. Raises SandboxFault when the sandbox itself failed.
        """
        raise NotImplementedError

    def note(self, arguments: Mapping[str, Any], notes: dict[str, str]) -> Result:
        """Changes the notes of a repository as a call asks. Only where ``notes`` is set.

        It depends on nothing else, since it is done again when the record is read.
        """
        raise NotImplementedError

    def failed(self, content: str, *, ok: bool) -> bool:
        """True if a result says that something is wrong, as a failing test or command does.

        content, ok: of the result.
        """
        return not ok

    @property
    def name(self) -> str:
        """The name in the schema."""
        return self.schema["name"]

    @property
    def delegation(self) -> Delegation | None:
        """Limits of another context of the policy that carries out a call (``environment.frames``);
        its argument ``question`` is the prompt. None for a tool that works by itself.
        """
        return None

    def members(self) -> Sequence[Tool]:
        """The tools that this entry of a config offers: itself, unless it stands for several.
        Raises ValueError where they cannot be found out.
        """
        return (self,)


def function_schema(
    name: str, description: str, properties: Mapping[str, Any], required: tuple[str, ...]
) -> dict[str, Any]:
    """A function schema in OpenAI's form; arguments outside ``properties`` are not allowed.

    Raises ValueError for a type of argument that calls cannot be checked for.
    """
    for argument, description_of in properties.items():
        for kind in unknown_types(description_of):
            raise ValueError(
                f"tool {name}: type {kind!r} of argument {argument} must be one of "
                f"{', '.join(TYPES)}"
            )
    parameters = {
        "type": "object",
        "properties": dict(properties),
        "required": list(required),
        "additionalProperties": False,
    }
    return {"name": name, "description": description, "parameters": parameters}


def words_of(tool: Tool) -> Words:
    """The tool's words, or those that follow from its schema."""
    if tool.words is not None:
        return tool.words
    arguments = Arguments(tool.schema)
    texts = [name for name in arguments.required if arguments.kinds(name) == ("string",)]
    numbers = [name for name in arguments.properties if arguments.kinds(name) == ("integer",)]
    return Words(tool.name, {name: name for name in numbers}, {name: name for name in texts})


def check_arguments(tool: Tool, arguments: Mapping[str, Any]) -> str:
    """Complaint about the arguments of a call, in words for the model; "" when they are right."""
    known = Arguments(tool.schema)
    expected = ", ".join(known.properties) or "none"
    for name in known.required:
        if name not in arguments:
            return f"{tool.name}: missing argument {name}; arguments: {expected}"
    for name, value in arguments.items():
        if not known.takes(name):
            return f"{tool.name}: unknown argument {one_line(name, 40)}; arguments: {expected}"
        if not known.accepts(name, value):
            wanted = " or ".join(known.kinds(name))
            return f"{tool.name}: argument {name} must be {wanted}, got {type(value).__name__}"
        if wrong := _wrong(value):
            return f"{tool.name}: argument {name} {wrong}"
    return ""


def _wrong(argument: Any) -> str:
    """Complaint about the values of an argument at all depths; "" when they are right."""
    pending = [(argument, 0)]
    for seen, (value, depth) in enumerate(pending):
        if seen == _MOST_VALUES or depth > _DEEPEST:
            return f"has more than {_MOST_VALUES} values or is nested more than {_DEEPEST} deep"
        if type(value) in (int, float) and not -_LARGEST <= value < _LARGEST:  # nor NaN
            return "is out of range"
        if type(value) is str and encodable(value) != value:  # it could not be written to a file
            return "is not valid Unicode"
        if type(value) is dict:
            value = [*value, *value.values()]
        if type(value) is list:
            pending += [(item, depth + 1) for item in value[:_MOST_VALUES]]
    return ""
