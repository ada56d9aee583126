"""Runs an agent's program inside of a sandbox, and carries its connections to the endpoint.

python runner.py DESCRIPTOR, with the job as JSON on standard input. The sandbox has a network of
its own with nothing but a loopback. There this program listens at the port that the endpoint has on
the host, and carries what is said over the socket DESCRIPTOR, as frames: the number of a
connection, the length, the bytes; a length of 0 says that the connection is closed.

It exits as the agent does. Nothing that it says is trusted on the host. Standard library only.
"""

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading

HEAD = struct.Struct("<II")
PIECE = 1 << 16
# The exit code of an agent that cannot be started, as shells have it.
NOT_FOUND = 127


class Relay:
    """Carries connections of the loopback over one socket."""

    def __init__(self, channel, port):
        self.channel = channel
        self.server = socket.create_server(("127.0.0.1", port))
        self.lock = threading.Lock()
        self.open = {}

    def start(self):
        """Carries in the background."""
        for work in (self.accept, self.receive):
            threading.Thread(target=work, daemon=True).start()

    def accept(self):
        """Takes connections, each with a thread that reads it."""
        number = 0
        while True:
            connection, _ = self.server.accept()
            number += 1
            self.open[number] = connection
            threading.Thread(target=self.read, args=(number, connection), daemon=True).start()

    def read(self, number, connection):
        """Sends what a connection says, until it ends."""
        data = b"start"
        while data:
            try:
                data = connection.recv(PIECE)
            except OSError:
                data = b""
            with self.lock:
                self.channel.sendall(HEAD.pack(number, len(data)) + data)

    def receive(self):
        """Gives connections what comes for them; ends with the host."""
        stream = self.channel.makefile("rb")
        while len(head := stream.read(HEAD.size)) == HEAD.size:
            number, length = HEAD.unpack(head)
            data = stream.read(length)
            connection = self.open.get(number)
            if connection is None:
                continue
            with contextlib.suppress(OSError):  # the agent has closed it
                if data:
                    connection.sendall(data)
                else:
                    connection.shutdown(socket.SHUT_RDWR)
                    connection.close()
                    del self.open[number]
        os._exit(0)


class Client:
    """The client's side of the Agent Client Protocol: JSON-RPC, a line each, over the agent's
    standard input and output.
    """

    def __init__(self, process, folder):
        self.process, self.folder = process, folder
        self.count = 0

    def play(self, task):
        """Has the agent do the task; the exit code that says how it ended."""
        able = {"fs": {"readTextFile": True, "writeTextFile": True}, "terminal": False}
        about = {"name": "rl_code", "version": "1"}
        asked = {"protocolVersion": 1, "clientCapabilities": able, "clientInfo": about}
        self.ask("initialize", asked)
        session = self.ask("session/new", {"cwd": self.folder, "mcpServers": []})["sessionId"]
        prompt = [{"type": "text", "text": task}]
        done = self.ask("session/prompt", {"sessionId": session, "prompt": prompt})
        reason = done.get("stopReason")
        if reason != "end_turn":
            print(f"the agent stopped: {reason}", flush=True)
        return 0 if reason == "end_turn" else 1

    def ask(self, method, params):
        """The result of a request; answers what the agent asks meanwhile."""
        self.count += 1
        number = self.count
        self.say({"id": number, "method": method, "params": params})
        for line in self.process.stdout:
            try:
                said = json.loads(line)
            except ValueError:
                sys.stdout.write(f"no JSON: {line[:200]!r}\n")
                continue
            if not isinstance(said, dict):
                continue
            if "method" in said:
                if "id" in said:
                    self.say({"id": said["id"], **self.answer(said["method"], said["params"])})
            elif said.get("id") == number:
                if "error" in said:
                    raise RuntimeError(f"{method}: {json.dumps(said['error'])[:1000]}")
                return said.get("result") or {}
        raise RuntimeError(f"{method}: the agent has closed its output")

    def say(self, message):
        """Sends a message."""
        self.process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, method, params):
        """The answer to a request of the agent's."""
        try:
            if method == "session/request_permission":
                return {"result": {"outcome": allowed(params["options"])}}
            if method == "fs/read_text_file":
                with open(params["path"], encoding="utf-8") as file:
                    lines = file.read().splitlines(keepends=True)
                first = (params.get("line") or 1) - 1
                last = first + (params.get("limit") or len(lines))
                return {"result": {"content": "".join(lines[first:last])}}
            if method == "fs/write_text_file":
                os.makedirs(os.path.dirname(params["path"]), exist_ok=True)
                with open(params["path"], "w", encoding="utf-8") as file:
                    file.write(params["content"])
                return {"result": {}}
        except (OSError, ValueError, LookupError, TypeError) as error:
            return {"error": {"code": -32603, "message": f"{type(error).__name__}: {error}"}}
        return {"error": {"code": -32601, "message": f"{method} is not supported"}}


def allowed(options):
    """The outcome of a question for permission: yes, in this sandbox."""
    kinds = {option["kind"]: option["optionId"] for option in options}
    for kind in ("allow_once", "allow_always"):
        if kind in kinds:
            return {"outcome": "selected", "optionId": kinds[kind]}
    return {"outcome": "cancelled"}


def run(job):
    """Runs the agent; its exit code."""
    for path, text in job["files"].items():
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    spoken = job["speaks"] == "acp"
    try:
        process = subprocess.Popen(
            job["command"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if spoken else None,
            env=os.environ | job["environment"],
        )
    except OSError as error:
        print(f"{job['command'][0]}: {error.strerror}", flush=True)
        return NOT_FOUND
    if not spoken:
        with contextlib.suppress(OSError):  # an agent that does not read it
            process.communicate(job["stdin"].encode())
        code = process.wait()
        return code if code >= 0 else 128 - code
    try:
        return Client(process, os.getcwd()).play(job["task"])
    except (RuntimeError, OSError, LookupError, TypeError) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return 1
    finally:
        process.kill()


def main():
    """Runs the job of standard input."""
    job = json.load(sys.stdin)
    # the agent's own files come first: an error of them is its end
    Relay(socket.socket(fileno=int(sys.argv[1])), job["port"]).start()
    code = run(job)
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
