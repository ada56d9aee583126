"""An agent on the published package agent-client-protocol, inside of a sandbox: it reads the task's
file through its client, asks the policy for the new text, asks for permission, and writes it.

python acp_agent.py URL MODEL PATH
"""

import asyncio
import json
import os
import sys
import urllib.request

import acp
from acp.schema import PermissionOption, ToolCallUpdate


class Writer:
    """The agent's side. Methods that it lacks are refused by the package."""

    def __init__(self, url, model, path):
        self.url, self.model, self.path = url, model, path

    def on_connect(self, conn):
        self.client = conn

    async def initialize(self, protocol_version, client_capabilities=None, **_):
        assert client_capabilities.fs.read_text_file and client_capabilities.fs.write_text_file
        return acp.InitializeResponse(protocol_version=protocol_version)

    async def new_session(self, cwd, **_):
        self.path = os.path.join(cwd, self.path)
        return acp.NewSessionResponse(session_id="one")

    async def prompt(self, session_id, prompt, **_):
        read = await self.client.read_text_file(path=self.path, session_id=session_id)
        text = f"{prompt[0].text}\n{read.content}"
        body = {"model": self.model, "messages": [{"role": "user", "content": text}]}
        asked = urllib.request.Request(f"{self.url}/chat/completions", json.dumps(body).encode())
        with urllib.request.urlopen(asked) as answer:
            said = json.loads(answer.read())["choices"][0]["message"]["content"]
        await self.client.session_update(session_id, acp.update_agent_message_text(said))
        options = [PermissionOption(kind="reject_once", name="no", option_id="no")]
        options.append(PermissionOption(kind="allow_once", name="yes", option_id="yes"))
        call = ToolCallUpdate(tool_call_id="write", title="write")
        may = await self.client.request_permission(
            options=options, session_id=session_id, tool_call=call
        )
        assert may.outcome.option_id == "yes"
        await self.client.write_text_file(content=said, path=self.path, session_id=session_id)
        return acp.PromptResponse(stop_reason="end_turn")


if __name__ == "__main__":
    asyncio.run(acp.run_agent(Writer(*sys.argv[1:])))
