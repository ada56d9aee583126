"""The page shows what the database says, changes nothing without the admin key, and draws in
Chromium.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import shutil
import subprocess
import threading
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import uvicorn
from starlette.applications import Starlette

from people.feedback.poisoning import Suspect
from people.feedback.store import FeedbackStore
from people.realtime import dashboard
from people.realtime.dashboard import PAGE, Dashboard
from people.realtime.satisfaction import Curve, Rewarded
from people.realtime.tables import ALARMS
from tests.late import Late
from tests.people.feedback.people import answer
from tests.people.realtime.rehearsed import Rehearsed

image = Late("matplotlib.image")


KEY = "a key of sixteen or more"
HOSTILE = "</script><script>alert(1)</script>"


@pytest.fixture
def rehearsed(tmp_path):
    found = Rehearsed(tmp_path)
    found.until("watch")
    found.ledger.raise_alarm(1, "edited", found.now, HOSTILE, ["session-3"])
    found.parts.wait(1.0)
    assert not found.cycle.step()  # the alarm holds it, whatever the test says
    return found


def app(rehearsed: Rehearsed, key: str | None = KEY, truth: Curve | None = None) -> Starlette:
    ways = rehearsed.ledger, rehearsed.parts.store, rehearsed.config, key, rehearsed.clock
    return Starlette(routes=Dashboard(*ways, truth=truth).routes())


def truth_of(rehearsed: Rehearsed, folder: Path) -> Curve:
    """What 20 people thought of an answer, and what it has earned."""
    path = folder / "people.truth.jsonl"
    told = [{"answers": [str(i)], "right": i % 2, "satisfaction": i % 2} for i in range(20)]
    path.write_text("".join(json.dumps(one) + "\n" for one in told))
    began_at = rehearsed.ledger.current().began_at
    paid = [Rewarded(str(i), 0, began_at, i % 2 + i % 5 / 2) for i in range(20)]
    return Curve(path, lambda versions, since: paid, 0)


def ask(app: Starlette, method: str, path: str, body: bytes = b"", key: str | None = None):
    """Status, headers and body of an answer, without a socket."""
    sent: list[dict] = []
    headers = [(b"authorization", f"Bearer {key}".encode())] if key is not None else []
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
    }

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    text = b"".join(one.get("body", b"") for one in sent)
    return sent[0]["status"], dict(sent[0]["headers"]), text


def post(app: Starlette, what: str, content, key: str | None = KEY):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    status, _, text = ask(app, "POST", f"/dashboard/{what}", body, key)
    return status, json.loads(text)


def test_the_state_is_what_the_database_says(rehearsed):
    status, _, text = ask(app(rehearsed), "GET", "/dashboard/state.json")
    state = json.loads(text)
    assert status == 200
    assert state["cycle"]["state"] == "watch" and state["cycle"]["candidate"] == 1
    assert state["cycle"]["look"]["users"][0] > 0
    assert [one["version"] for one in state["versions"]] == [0, 1]
    assert state["cycles"][0]["verdict"]["passed"] is True
    assert state["alarms"][0]["sessions"] == ["session-3"]
    assert state["edges"][-1]["after"] == "watch"
    assert "reward" in state["sessions"][0]["values"]
    ats = [one["at"] for one in state["sessions"]]
    assert ats == sorted(ats, reverse=True)
    assert state["truth"] is None


def test_the_correlation_of_reward_and_satisfaction_is_shown_where_there_is_a_file(
    rehearsed, tmp_path
):
    served = app(rehearsed, truth=truth_of(rehearsed, tmp_path))
    state = json.loads(ask(served, "GET", "/dashboard/state.json")[2])
    (point,) = state["truth"]["points"]
    assert state["truth"]["file"] == "people.truth.jsonl" and point["turns"] == 20
    # variances 1/4 and 1/4 + 1/2 of two that are independent
    assert point["correlation"]["mean"] == pytest.approx(0.25 / math.sqrt(0.25 * 0.75))
    assert point["correlation"]["low"] < 0.577 < point["correlation"]["high"]


def test_many_open_pages_read_the_sessions_once_in_an_interval(rehearsed, monkeypatch):
    reads = []
    store = rehearsed.parts.store
    sessions = store.sessions
    monkeypatch.setattr(store, "sessions", lambda *asked: reads.append(1) or sessions(*asked))
    now = [100.0]
    monkeypatch.setattr(dashboard.time, "monotonic", lambda: now[0])
    served = app(rehearsed)
    first = [ask(served, "GET", "/dashboard/state.json")[2] for _ in range(5)]
    assert len(reads) == 1 and len({*first}) == 1
    now[0] += dashboard.EVERY_S
    ask(served, "GET", "/dashboard/state.json")
    assert len(reads) == 2
    # who changes something sees it at once
    assert post(served, "acknowledge", {"cycle": 1, "monitor": "edited"})[0] == 200
    state = json.loads(ask(served, "GET", "/dashboard/state.json")[2])
    assert len(reads) == 3 and state["alarms"][0]["acknowledged_at"] is not None
    # the interval is that of the page
    assert f"EVERY_MS = {1000 * dashboard.EVERY_S:.0f}," in PAGE.read_text()


def test_marks_of_deletion_and_suspects_are_shown(rehearsed):
    store = FeedbackStore(rehearsed.engine, clock=rehearsed.clock)
    for user in ("ann", "bob"):
        store.record_answer(answer(user, user))
    store.mark_used(1, store.select(rehearsed.now, [1]))
    store.list_suspects(1, [Suspect("bob", "steady_times", 0.1, HOSTILE)])
    store.delete_user("ann")
    state = json.loads(ask(app(rehearsed), "GET", "/dashboard/state.json")[2])
    (marked,) = state["training_sets"]
    assert (marked["cycle"], marked["answers"], marked["deleted"], marked["expired"]) == (
        1,
        2,
        1,
        0,
    )
    (suspect,) = state["suspects"]
    assert (suspect["cycle"], suspect["user"], suspect["reason"]) == (1, "bob", "steady_times")
    page = PAGE.read_text()
    assert "one.deleted" in page and "suspect.text" in page and "drawTraining, " in page


def test_a_database_without_a_cycle_is_a_page_too(tmp_path):
    rehearsed = Rehearsed(tmp_path)
    for table in reversed(ALARMS.metadata.sorted_tables):
        table.drop(rehearsed.engine)
    _, _, text = ask(app(rehearsed), "GET", "/dashboard/state.json")
    assert json.loads(text)["cycle"] is None


@pytest.mark.parametrize("key", [None, "", "another key of sixteen"])
@pytest.mark.parametrize("what", ["acknowledge", "roll_back"])
def test_nothing_changes_without_the_admin_key(rehearsed, what, key):
    served = app(rehearsed)
    body = {"cycle": 1, "monitor": "edited"}
    status, said = post(served, what, body, key)
    assert status == 401 and "admin key" in said["error"]
    # nor where there is no admin
    assert post(app(rehearsed, None), what, body, "")[0] == 401
    assert rehearsed.ledger.alarms(1) == {"edited": False}
    assert rehearsed.ledger.current().state == "watch"


def test_a_server_with_keys_shows_the_state_to_admins_alone(rehearsed):
    board = Dashboard(
        rehearsed.ledger,
        rehearsed.parts.store,
        rehearsed.config,
        KEY,
        rehearsed.clock,
        may_read="an admin of the file".__eq__,
    )
    served = Starlette(routes=board.routes())
    for key, expected in (
        (None, 401),
        ("", 401),
        ("x", 401),
        (KEY, 200),
        ("an admin of the file", 200),
    ):
        assert ask(served, "GET", "/dashboard/state.json", key=key)[0] == expected
    # the page says nothing of the state, and asks for the key
    assert ask(served, "GET", "/dashboard")[0] == 200
    assert "answer.status === 401" in PAGE.read_text()


def test_an_admin_acknowledges_and_rolls_back(rehearsed):
    served = app(rehearsed)
    assert post(served, "acknowledge", {"cycle": 1, "monitor": "edited"})[0] == 200
    assert rehearsed.ledger.alarms(1) == {"edited": True}
    assert post(served, "roll_back", {"cycle": 1}) == (200, {"rolled_back": 1})
    assert rehearsed.ledger.current().state == "roll_back"
    assert post(served, "roll_back", {"cycle": 1})[0] == 409
    rehearsed.until("collect", 2)
    assert rehearsed.parts.fleet.routing().deployed == 0


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "no JSON"),
        (b"[1]", 400, "number of a cycle"),
        ({"cycle": "1"}, 400, "number of a cycle"),
        ({"cycle": 1, "monitor": 5}, 400, "monitor = 5"),
        ({"cycle": 1, "monitor": "latency"}, 404, "no alarm 'latency'"),
        (b" " * 5_000, 413, "4096 bytes"),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong(rehearsed, body, status, said):
    found, text = post(app(rehearsed), "acknowledge", body)
    assert found == status and said in text["error"]


def test_a_short_admin_key_is_refused(rehearsed):
    with pytest.raises(ValueError, match="can be guessed"):
        app(rehearsed, "short")


def test_the_page_may_run_its_own_script_alone_and_needs_nothing_from_elsewhere(rehearsed):
    status, headers, text = ask(app(rehearsed), "GET", "/dashboard")
    policy = headers[b"content-security-policy"].decode()
    assert status == 200 and "default-src 'none'" in policy and "unsafe-eval" not in policy
    assert re.search(r"script-src 'sha256-[\w+/=]+';", policy)
    # its icon is a data URL
    assert "img-src data:;" in policy and 'href="data:' in text.decode()
    page = text.decode()
    outside = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|innerHTML|insertAdjacentHTML|document\.write", outside)


def test_the_page_says_its_language_and_labels_what_can_be_operated():
    class Tags(HTMLParser):
        def __init__(self):
            super().__init__()
            self.seen = []

        def handle_starttag(self, tag, attrs):
            self.seen.append((tag, dict(attrs)))

    parser = Tags()
    text = PAGE.read_text()
    parser.feed(text)
    assert ("html", {"lang": "en"}) in parser.seen
    assert any(attrs.get("name") == "viewport" for _, attrs in parser.seen)
    assert any(attrs.get("role") == "status" for _, attrs in parser.seen)
    assert 'el("label", { for: "key" }' in text and "prefers-color-scheme: dark" in text


needs_chromium = pytest.mark.skipif(
    shutil.which("chromium") is None, reason="no chromium: apt-get install chromium"
)


@contextlib.contextmanager
def browser(rehearsed: Rehearsed, folder: Path):
    """Serves the page; what runs Chromium on it with further flags."""
    served = app(rehearsed, truth=truth_of(rehearsed, folder))
    config = uvicorn.Config(served, "127.0.0.1", 0, log_level="error")
    server = uvicorn.Server(config)
    socket = config.bind_socket()
    thread = threading.Thread(target=server.run, args=([socket],), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{socket.getsockname()[1]}/dashboard"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"]
    flags += [f"--user-data-dir={folder}/profile", "--virtual-time-budget=4000"]

    def run(*further: str) -> subprocess.CompletedProcess:
        command = ["chromium", *flags, *further, url]
        return subprocess.run(command, capture_output=True, text=True, timeout=500)

    try:
        yield run
    finally:
        server.should_exit = True
        thread.join()


@pytest.mark.long
@needs_chromium
def test_chromium_draws_the_page_and_hostile_text_stays_text(rehearsed, tmp_path):
    store = FeedbackStore(rehearsed.engine, clock=rehearsed.clock)
    store.record_answer(answer("a"))
    store.mark_used(1, store.select(rehearsed.now, [1]))
    store.list_suspects(1, [Suspect("bob", "steady_times", 0.1, "all alike" + HOSTILE)])
    with browser(rehearsed, tmp_path) as run:
        done = run("--dump-dom")
    drawn = done.stdout
    assert "cycle 1, watch" in drawn, done.stderr
    assert 'aria-current="step"' in drawn and "Guardrails" in drawn and "<svg" in drawn
    assert "Reward and satisfaction" in drawn and "0.577 [0.181, 0.812]" in drawn
    # numbers of the axes: -1 stands at 50 + 48 % of the height, and the only cycle in the middle
    for number in ('98%">−1<', '74%">−0.5<', '50%">0<', '26%">0.5<', '2%">1<'):
        assert f'<span style="top: {number}/span>' in drawn
    assert '<span style="left: 50%">1</span>' in drawn
    assert "steady times, counts 0.1: all alike&lt;/script&gt;" in drawn
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in drawn


@pytest.mark.long
@needs_chromium
def test_the_page_is_drawn_wide_and_narrow_light_and_dark(rehearsed, tmp_path):
    """The pictures stay in pytest's folder, to be looked at."""
    with browser(rehearsed, tmp_path) as run:
        # colours do not depend on the width, nor the layout on colours
        for width, scheme in ((1280, "dark"), (390, "light")):
            path = tmp_path / f"{width}_{scheme}.png"
            done = run(
                f"--screenshot={path}",
                f"--window-size={width},1600",
                "--hide-scrollbars",
                # by their numbers in Blink
                f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
            )
            assert path.exists(), done.stderr
            picture = image.imread(path)[..., :3]
            assert picture.shape[1] == width
            # paper, with ink on it from top to bottom
            paper = np.median(picture)
            assert (paper > 0.9) if scheme == "light" else (paper < 0.2)
            ink = np.abs(picture.mean(axis=2) - paper).max(axis=1) > 0.5
            assert ink[: len(ink) // 2].any() and ink[len(ink) // 2 :].any()
            # the margin at the right is empty: nothing hangs over it
            assert np.ptp(picture[100:, -8:].mean(axis=2)) < 0.05
