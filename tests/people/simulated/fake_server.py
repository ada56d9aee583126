"""A stand-in for the server: answers completions and chats from functions, keeps events as it says
it does, and fails when it is told to.
"""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable


class FakeServer:
    """Serves on loopback until it is closed."""

    def __init__(
        self,
        complete: Callable[[str, str], str | None] = lambda prefix, suffix: "x + 1",
        chat: Callable[[dict], list[tuple[str, dict]] | str | int] = lambda body: "hello",
    ):
        # The message of an agent to a request: its calls, a text, or a status that refuses.
        self.chat = chat
        # The text between two others; None refuses with status 404.
        self.complete = complete
        # key -> event as it was first recorded; refused answers.
        self.events: dict[str, dict] = {}
        self.refused: set[str] = set()
        # Bodies and headers of all requests, in order.
        self.requests: list[tuple[str, dict, dict]] = []
        # What the next requests meet instead of an answer: a status, "drop" for a connection that
        # is cut before anything is done, "lose" for one that is cut after it was done.
        self.faults: list[int | str] = []
        self.changed = threading.Condition()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                outer.handle(self)

            def do_GET(self):
                models = [{"id": name} for name in ("auto", "policy@1")]
                outer.send(self, 200, {"data": models}, {})

            def log_message(self, *arguments):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), daemon=True
        )
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def handle(self, request) -> None:
        body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        with self.changed:
            fault = self.faults.pop(0) if self.faults else None
            self.requests.append((request.path, body, dict(request.headers)))
            if fault == "drop":
                request.close_connection = True
                self.changed.notify_all()
                return
            if isinstance(fault, int):
                self.send(request, fault, {"error": {"message": "not now"}}, {"Retry-After": "0"})
                self.changed.notify_all()
                return
            answer = self.answer(request.path, body)
            self.changed.notify_all()
        if isinstance(answer, int):
            error = {"message": "too long", "code": "context_length_exceeded"}
            self.send(request, answer, {"error": error}, {})
            return
        if fault == "lose":
            request.close_connection = True
            return
        self.send(request, 200 if answer is not None else 404, answer or {"error": {}}, {})

    def answer(self, path: str, body: dict) -> dict | int | None:
        if path == "/v1/chat/completions":
            said = self.chat(body)
            return said if isinstance(said, int) else self.message(said)
        if path == "/v1/completions":
            text = self.complete(body["prompt"], body["suffix"])
            if text is None:
                return None
            choice = {
                "index": 0,
                "text": text,
                "finish_reason": "stop",
                "logprobs": {"token_logprobs": [-0.1, -0.3]},
            }
            return {"id": f"cmpl-{len(self.requests)}", "choices": [choice]}
        if path == "/v1/feedback":
            return {"results": [self.record(event) for event in body["events"]]}
        return None

    def message(self, said: list[tuple[str, dict]] | str) -> dict:
        message: dict = {"role": "assistant", "content": said if isinstance(said, str) else ""}
        number = len(self.requests)
        if not isinstance(said, str):
            message["tool_calls"] = [
                {
                    "id": f"call_{number}_{i}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments)},
                }
                for i, (name, arguments) in enumerate(said)
            ]
        return {"id": f"chat-{number}", "choices": [{"index": 0, "message": message}]}

    def record(self, event: dict) -> dict:
        key = event["key"]
        if event["answer"] in self.refused:
            return {"key": key, "status": "refused", "why": "of another key"}
        if key in self.events:
            return {"key": key, "status": "repeated", "why": ""}
        self.events[key] = event
        return {"key": key, "status": "recorded", "why": ""}

    def send(self, request, status: int, body: dict, headers: dict) -> None:
        data = json.dumps(body).encode()
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(data)

    def of_kind(self, kind: str) -> list[dict]:
        return [event for event in self.events.values() if event["kind"] == kind]

    def wait_for(self, kind: str, count: int = 1, timeout_s: float = 120.0) -> list[dict]:
        """The events of a kind, as soon as there are so many."""
        with self.changed:
            found = self.changed.wait_for(lambda: len(self.of_kind(kind)) >= count, timeout_s)
            assert found, (
                f"{count} events {kind!r} never came; there are {list(self.events.values())}"
            )
            return self.of_kind(kind)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
