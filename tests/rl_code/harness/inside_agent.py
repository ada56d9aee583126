"""An agent program for tests that runs inside of a sandbox, with its own shell: the standard library,
and one of the APIs.

python inside_agent.py URL MODEL TASK {chat | responses | messages} [compacting | dies | killed |
stays | noise]: "compacting" begins anew after each command, with its output alone; "dies" and
"killed" end after the first command, "stays" never ends, and "noise" also sends what is no request.
With "acp" in place of TASK it speaks the Agent Client Protocol, and asks by chats.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
TOOL = {"name": "bash", "description": "Runs a command."}


class Chat:
    """A conversation over chats."""

    path = "chat/completions"

    def __init__(self, task):
        self.history = [{"role": "user", "content": task}]

    def body(self):
        function = {"type": "function", "function": TOOL | {"parameters": SCHEMA}}
        return {"messages": self.history, "tools": [function]}

    def read(self, body):
        message = body["choices"][0]["message"]
        self.history.append(message)
        calls = message.get("tool_calls") or []
        return [(call["id"], call["function"]["arguments"]) for call in calls]

    def add(self, id, output):
        self.history.append({"role": "tool", "tool_call_id": id, "content": output})


class Responses(Chat):
    """A conversation over the Responses API."""

    path = "responses"

    def body(self):
        return {"input": self.history, "tools": [TOOL | {"type": "function", "parameters": SCHEMA}]}

    def read(self, body):
        self.history += body["output"]
        calls = [item for item in body["output"] if item["type"] == "function_call"]
        return [(call["call_id"], call["arguments"]) for call in calls]

    def add(self, id, output):
        self.history.append({"type": "function_call_output", "call_id": id, "output": output})


class Messages(Chat):
    """A conversation over the Messages API."""

    path = "messages"

    def body(self):
        tools = [TOOL | {"input_schema": SCHEMA}]
        return {"messages": self.history, "tools": tools, "max_tokens": 200}

    def read(self, body):
        self.history.append({"role": "assistant", "content": body["content"]})
        calls = [block for block in body["content"] if block["type"] == "tool_use"]
        return [(call["id"], json.dumps(call["input"])) for call in calls]

    def add(self, id, output):
        result = {"type": "tool_result", "tool_use_id": id, "content": output}
        self.history.append({"role": "user", "content": [result]})


KINDS = {"chat": Chat, "responses": Responses, "messages": Messages}


def ask(url, model, talk):
    request = urllib.request.Request(
        f"{url}/{talk.path}", json.dumps({"model": model, **talk.body()}).encode()
    )
    with urllib.request.urlopen(request) as answer:
        return talk.read(json.loads(answer.read()))


def make_noise(url):
    """Requests that are none, and halves of requests."""
    port = int(url.split(":")[2].split("/")[0])
    head = b"POST /v1/responses HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{"
    for data in (b"\0\1\2\r\n\r\n", head, b"GET / HTTP/1.1\r\n", b""):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(data)


def play(url, model, task, kind, option=""):
    talk = KINDS[kind](task)
    if option == "noise":
        make_noise(url)
    while calls := ask(url, model, talk):
        for id, arguments in calls:
            command = json.loads(arguments)["command"]
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
            talk.add(id, f"{done.stdout}exit {done.returncode}")
        if option == "compacting":
            talk = KINDS[kind](f"{task}\nSo far: {done.stdout}")
        if option == "dies":
            sys.exit("it dies")
        if option == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        while option == "stays":
            time.sleep(60)


def serve(url, model):
    """The agent's side of the Agent Client Protocol."""
    for line in sys.stdin:
        asked = json.loads(line)
        result = {}
        if asked["method"] == "initialize":
            result = {"protocolVersion": asked["params"]["protocolVersion"]}
        if asked["method"] == "session/new":
            assert asked["params"]["cwd"] == os.getcwd()
            result = {"sessionId": "one"}
        if asked["method"] == "session/prompt":
            play(url, model, asked["params"]["prompt"][0]["text"], "chat")
            result = {"stopReason": "end_turn"}
            update = {
                "sessionUpdate": "agent_message_chunk",
                "content": {"type": "text", "text": ""},
            }
            told = {"sessionId": "one", "update": update}
            print(json.dumps({"jsonrpc": "2.0", "method": "session/update", "params": told}))
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)


if __name__ == "__main__":
    if sys.argv[3] == "acp":
        serve(*sys.argv[1:3])
    else:
        play(*sys.argv[1:])
