"""Forms that a request asks of its answers: JSON of a schema, calls of its tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rl_code.environment.protocols.protocol import Protocol
from rl_code.environment.tools.schema import Arguments
from rl_code.harness.endpoint.fields import ApiError, Request, refuse
from rl_code.harness.endpoint.grammars import Answer, Grammars, json_grammar
from rl_code.harness.endpoint.requests import ChatRequest


def start_forms(request: Request, protocol: Protocol, grammars: Grammars) -> list[Answer | None]:
    """The state of the grammar of each answer, None for answers in any form.

    Raises ApiError for a form of the answer, or of arguments, that cannot be kept.
    """
    if request.json_schema and protocol.thinking(""):
        # the thought, which the prompt begins, is no JSON
        why = "this model thinks before it answers"
        raise refuse("response_format", why, "unsupported_value")
    tools = request.tools if isinstance(request, ChatRequest) else ()
    for at, tool in enumerate(tools):
        if tool.get("strict"):
            try:
                grammars.start(json_grammar(json.dumps(tool.get("parameters", {}))), 1)
            except ValueError as error:
                raise _refused(f"tools[{at}].function.parameters", error) from error
    if isinstance(request, ChatRequest) and request.forced:
        try:
            return [*_Calls(request, protocol, grammars).start()]
        except ValueError as error:
            raise _refused("tool_choice", error) from error
    if not request.json_schema:
        return [None] * request.n
    try:
        if isinstance(request, ChatRequest) and tools:
            return [*_Calls(request, protocol, grammars).start()]
        return [*grammars.start(json_grammar(request.json_schema), request.n)]
    except ValueError as error:
        raise _refused("response_format", error) from error


class _Calls:
    """Messages that are calls of the tools that may be called, or else JSON where it is asked for.

    Arguments have the schemas of their tools. Of a tool that is not strict, and whose schema the
    grammar cannot follow, they have the names and the types.
    """

    def __init__(self, request: ChatRequest, protocol: Protocol, grammars: Grammars):
        self._request, self._protocol, self._grammars = request, protocol, grammars

    def start(self) -> list[Answer]:
        """The states of all answers. Raises ValueError where the protocol has no such grammar."""
        names = self._request.forced
        tools = [tool for tool in self._request.tools if not names or tool["name"] in names]
        functions = [_function(tool["name"], tool.get("parameters", {})) for tool in tools]
        try:
            return self._started(functions)
        except ValueError:
            loose = [
                function if tool.get("strict") or self._follows(function) else _loose(tool)
                for tool, function in zip(tools, functions, strict=True)
            ]
            if loose == functions:
                raise
            return self._started(loose)

    def _follows(self, function: Mapping[str, Any]) -> bool:
        try:
            self._started([function])
        except ValueError:
            return False
        return True

    def _started(self, functions: Sequence[Mapping[str, Any]]) -> list[Answer]:
        grammar = self._protocol.grammar(
            functions,
            self._grammars.special,
            many=self._request.parallel,
            content=self._request.json_schema,
        )
        return self._grammars.start(grammar, self._request.n)


def _function(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "parameters": {**parameters, "type": "object"}}


def _loose(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function whose arguments have the names and types of a tool's."""
    arguments = Arguments(tool)
    types = {key: {"type": list(arguments.kinds(key))} for key in arguments.properties}
    return _function(tool["name"], {"properties": types, "required": list(arguments.required)})


def _refused(param: str, error: ValueError) -> ApiError:
    return refuse(param, str(error), "unsupported_value")
