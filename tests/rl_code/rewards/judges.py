"""A judge that a test writes: an HTTP server on the loopback with the form of OpenAI's chat API."""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

# A message, a status with an error, or a body as it is.
type Reply = str | tuple[int, str] | bytes


class Judge:
    """A server that answers with what ``say`` makes of a request's body. A context manager."""

    def __init__(self, say: Callable[[Mapping[str, Any]], Reply]):
        self.requests: list[Mapping[str, Any]] = []
        self.keys: list[str | None] = []
        # Requests on their way at once, at most.
        self.most = 0
        self._now = 0
        lock = threading.Lock()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    outer.requests.append(body)
                    outer.keys.append(self.headers["Authorization"])
                    outer._now += 1
                    outer.most = max(outer.most, outer._now)
                try:
                    reply = say(body)
                finally:
                    with lock:
                        outer._now -= 1
                status, data = _bytes_of(reply)
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def _bytes_of(reply: Reply) -> tuple[int, bytes]:
    if isinstance(reply, bytes):
        return 200, reply
    if isinstance(reply, tuple):
        return reply[0], json.dumps({"error": {"message": reply[1]}}).encode()
    choice = {"message": {"role": "assistant", "content": reply}, "finish_reason": "stop"}
    return 200, json.dumps({"choices": [choice]}).encode()


def read(body: Mapping[str, Any]) -> tuple[dict[str, str], list[str], str]:
    """(Texts of the blocks, questions, code) of a request."""
    content = body["messages"][-1]["content"]
    found = re.findall(r"^BEGIN (\w+) (\w{32})\n(.*?)\nEND \1 \2$", content, re.S | re.M)
    questions = re.findall(r"^\d+\. (.*)$", content, re.MULTILINE)
    code = re.search(r"the line ANSWERS (\w+),", content)
    return {name: text for name, _, text in found}, questions, code[1] if code else ""


def honest(body: Mapping[str, Any], **answers: Callable[[str], bool]) -> str:
    """A judge that looks at the work. answers: by the last word of a question, its answer to the
    text of the block WORK.
    """
    blocks, questions, code = read(body)

    def answer(question: str) -> bool:
        numbers = re.findall(r"\d+", question)
        if len(numbers) == 2:
            return int(numbers[0]) > int(numbers[1])
        return answers[question.rstrip("?").split()[-1]](blocks["WORK"])

    said = map(answer, questions)
    lines = [f"{n}: {'yes' if yes else 'no'}" for n, yes in enumerate(said, start=1)]
    return "\n".join(["I looked at the work.", f"ANSWERS {code}", *lines])


def outside(body: Mapping[str, Any]) -> str:
    """All that a reader takes for words of its own user or system: the text outside of blocks, and
    what stands behind a sign by which a chat template begins a message.
    """
    system, content = (message["content"] for message in body["messages"])
    found = re.search(r"the mark (\w{32})", system)
    mark = found[1] if found else None
    kept: list[str] = []
    inside = False
    for line in content.splitlines():
        if mark and re.fullmatch(rf"(BEGIN|END) \w+ {mark}", line):
            inside = line.startswith("BEGIN")
        elif not inside:
            kept.append(line)
    signs = r"(?:<\|im_start\|>|\[INST\]|<start_of_turn>|<\|start_header_id\|>)(.*)"
    return "\n".join([*kept, *re.findall(signs, content, re.DOTALL)])
