"""A harness of verifiers that asks the model in the rollout's own process, with a taskset's tools.

It does what the package's ``null`` does, whose program is a process for each turn in an environment
that uv makes. ``verifiers_driver`` puts this folder on the path of the package's plugins, whose id
is the module's name. It is imported by a Python that has verifiers.
"""

import contextlib
import json

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["InProcess"]

# What an API says where a conversation is too long, which ends it and is no error.
_TOO_LONG = "context_length_exceeded"
_FAILED = 1
_LONGEST_ERROR = 2000


BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a bash command and return its stdout and stderr.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command."}},
            "required": ["command"],
        },
    },
}


class InProcessConfig(vf.HarnessConfig):
    """Settings: of those of every harness ``tool_timeout`` and ``disabled_tools`` are read."""

    bash: bool = False
    """True gives the model the tool ``bash``, whose commands run in the rollout's runtime."""


class InProcess(vf.Harness[InProcessConfig]):
    """Messages and calls of tools in turn, until a message has no call."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    NEEDS_CONTAINER = False

    def __init__(self, config):
        super().__init__(config)
        self.EXECUTES_CODE = config.bash

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        """As ``Harness.launch``: one segment, up to a message without a call."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        servers = {
            name: {"url": url, "timeout": self.config.tool_timeout}
            for name, url in mcp_urls.items()
        }
        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(
                httpx.AsyncClient(timeout=None, trust_env=False, verify=False)
            )
            schemas, places, connections = await connect_mcp({"mcpServers": servers}, stack)
            schemas = [
                schema
                for schema in [BASH] * self.config.bash + schemas
                if schema["function"]["name"] not in (self.config.disabled_tools or ())
            ]
            while True:
                reply = await client.post(
                    f"{endpoint}/chat/completions",
                    headers={"Authorization": f"Bearer {secret}"},
                    json={"model": ctx.model, "messages": messages}
                    | ({"tools": schemas} if schemas else {}),
                )
                if reply.status_code >= 400:
                    code = 0 if _TOO_LONG in reply.text else _FAILED
                    return vf.ProgramResult(code, "", reply.text[-_LONGEST_ERROR:])
                said = reply.json()["choices"][0]["message"]
                messages.append({key: part for key, part in said.items() if part is not None})
                calls = said.get("tool_calls") or []
                if not calls:
                    return vf.ProgramResult(0, "", "")
                for call in calls:
                    content = await result_of(
                        call["function"], schemas, places, connections, runtime
                    )
                    messages.append(
                        {"role": "tool", "tool_call_id": call["id"], "content": content}
                    )


async def result_of(function, schemas, places, connections, runtime):
    """The result of a call, or what was wrong with it, for the model to read."""
    name = function["name"]
    names = [schema["function"]["name"] for schema in schemas]
    if name not in names:
        return f"error: no tool {name!r}; there are {', '.join(names) or 'none'}"
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        return f"error: the arguments are no JSON: {error}"
    if not isinstance(arguments, dict):
        return "error: the arguments are no object of JSON"
    if name == "bash" and name not in places:
        command = arguments.get("command")
        if not isinstance(command, str):
            return "error: 'command' must be a string"
        done = await runtime.run(["bash", "-c", command], {})
        return done.stdout + done.stderr
    try:
        return await call_mcp(connections, places, name, arguments)
    except Exception as error:  # of the tool's own code, which the call may have provoked
        return f"error: {error}"
