"""The main job: people use a server over HTTP, and it learns from what they did. One cycle, with
everything real: the program, the engine, the learner, the database, and clients in processes.
"""

from __future__ import annotations

import json
import re
import signal
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from people.feedback.store import FeedbackStore
from people.realtime.ledger import Ledger
from people.realtime.tables import CYCLES, EDGES, VERSIONS
from rl_code.checkpoint import checkpoint
from tests import programs

# Sessions with which a cycle trains, and answers at most.
LEAST = 8
MOST = 32


def command(folder: Path, config: str, people: str) -> list[str]:
    """Small and short, since this watches what happens and not how good a model becomes.

    people: the part that brings them. They work on for as long as a cycle takes.
    """
    changes = {
        "parts.run.model.preset": "tests.models.small:SHALLOW",
        "parts.run.sft": None,
        "parts.run.train.tasks_per_step": MOST,
        "parts.run.train.pack.rows": MOST // 2,
        "parts.run.train.micro_batches": 2,
        f"parts.{people}.at_once": 3,
        "cycle.least_sessions": LEAST,
        "cycle.batch": MOST,
        "cycle.watch.most_s": 2.0,
    }
    flags = (f"--config.{name}={value}" for name, value in changes.items())
    config = f"--config=configs/{config}.py:smoke"
    return ["launch.realtime", config, f"--workdir={folder}", "--cycles=1", *flags]


def refuses(url: str) -> bool:
    """Whether a server takes no more requests, or has ended."""
    try:
        urllib.request.urlopen(f"{url}/readyz")
    except urllib.error.HTTPError as error:
        return error.code == 503 and error.read() == b"the server ends\n"
    except OSError:
        return True
    return False


def stop_in_training(folder: Path) -> None:
    """Starts the cycle and asks it to end as soon as it trains."""
    with programs.start(
        *command(folder, "realtime", "people"), devices=None, stderr=None
    ) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "collect -> train" in line:
                break
        else:
            pytest.fail("".join(lines))
        process.send_signal(signal.SIGTERM)
        # said at once by the handler
        assert any("stopping after this step" in line for line in process.stdout)
        url = re.search(r"(http://[\d.:]+)/dashboard", "".join(lines))[1]
        assert refuses(url)
        printed = process.stdout.read()
    assert process.returncode == 0, printed
    assert "train -> gate" not in printed


def refused(url: str, user: str, key: str) -> str:
    """Why a deletion is refused."""
    headers = {"Authorization": f"Bearer {key}"}
    asked = urllib.request.Request(f"{url}/v1/users/{user}", None, headers, method="DELETE")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(asked)
    assert caught.value.code == 403
    return json.load(caught.value)["error"]["code"]


@pytest.mark.long
def test_a_cycle_with_everything_real(tmp_path):
    stop_in_training(tmp_path)
    with programs.start(
        *command(tmp_path, "realtime", "people"), devices=None, stderr=None
    ) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            found = re.search(r"(http://[\d.:]+)/dashboard", line)
            if found:
                break
        else:
            pytest.fail("".join(lines))
        with urllib.request.urlopen(f"{found[1]}/dashboard/state.json") as answered:
            assert json.load(answered)["cycle"]["number"] == 1
        with urllib.request.urlopen(f"{found[1]}/healthz") as answered:
            assert answered.status == 200
        # all who send no key are one user, so nobody may delete for them; nor for others
        assert refused(found[1], "me", "") == "no_api_key"
        assert refused(found[1], "0" * 32, "a key") == "not_an_admin"
        printed = process.stdout.read()
    assert process.returncode == 0, printed
    # the table of cycles at the end
    assert "promoted" in printed or "rolled_back" in printed

    store = FeedbackStore(f"sqlite:///{tmp_path}/people.db")
    ledger = Ledger(store.engine)
    first, second = ledger.rows(CYCLES)
    assert first.state in ("promoted", "rolled_back") and second.state == "collect"
    assert [one.before for one in ledger.rows(EDGES)][:5] == [
        "collect",
        "train",
        "gate",
        "deploy",
        "watch",
    ]
    states = {row.version: row.state for row in ledger.rows(VERSIONS)}
    assert sorted(states) == [0, 1] and list(states.values()).count("deployed") == 1

    # what was trained on is what was recorded, and belongs to one cycle
    selection = store.used(1)
    assert len(selection.ids) == first.answers >= LEAST
    joined = store.joined(selection.ids, selection.watermark)
    assert store.digest(selection.ids, selection.watermark) == first.digest
    assert {answer.version for answer, _ in joined} == {0}
    assert all(len(answer.tokens) == len(answer.logprobs) for answer, _ in joined)
    assert any(
        event.kind in ("accepted", "rejected") for _, happened in joined for event in happened
    )
    # both arms answered while the candidate was watched, each person always from one
    watched = store.joined(store.routed([0, 1], first.watched_from))
    arms: dict[str, set[int]] = {}
    for answer, _ in watched:
        arms.setdefault(answer.user, set()).add(answer.version)
    assert all(answer.arm.startswith("policy@") for answer, _ in watched)
    assert store.counts()["waiting"] == 0
    assert store.refusals() == {}  # claims of simulated people are those that its config believes
    record = next((tmp_path / "versions/1/checkpoints").glob("step_*/*.json"))
    assert "made_of" in record.read_text()

    # the same command again has nothing to do, and says so
    again = programs.run(*command(tmp_path, "realtime", "people"), devices=None)
    assert again.returncode == 0, again.stderr
    assert len(ledger.rows(CYCLES)) == 2
    store.close()


@pytest.mark.long
def test_a_cycle_of_an_agent_with_everything_real(tmp_path):
    """People bring tasks to a served agent, carry out its tools, and what they report is trained on;
    what they think is nowhere but in their own file.
    """
    ran = programs.run(*command(tmp_path, "realtime_agent", "agents"), devices=None)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    store = FeedbackStore(f"sqlite:///{tmp_path}/people.db")
    (first, _) = Ledger(store.engine).rows(CYCLES)
    assert first.state in ("promoted", "rolled_back", "refused")
    selection = store.used(1)
    joined = store.joined(selection.ids, selection.watermark)
    assert len(joined) == first.answers >= 2 * LEAST  # a session has two answers and more
    assert {answer.kind for answer, _ in joined} == {"chat"}
    # an agent that has learned next to nothing is refused, and told so
    kinds = {event.kind for _, happened in joined for event in happened}
    assert {"shown", "rejected", "follow_up"} <= kinds
    lines = (tmp_path / "people.truth.jsonl").read_text().splitlines()
    assert lines and b"satisfaction" not in (tmp_path / "people.db").read_bytes()
    assert store.refusals() == {}
    store.close()
    told = programs.run("experiments.agent_people", str(tmp_path), devices=None)
    assert told.returncode == 0, told.stderr
    assert "follow_up" in told.stdout and (tmp_path / "agent.png").stat().st_size > 1_000


@pytest.mark.long
def test_a_cycle_of_an_agent_that_reads_documents(tmp_path):
    """It trains on what people say about answers by the mask that sampled them."""
    squid = "--config.parts.run.model.attention=squid"
    asked = command(tmp_path, "realtime_documents", "agents")
    ran = programs.run(*asked, squid, devices=None)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    store = FeedbackStore(f"sqlite:///{tmp_path}/people.db")
    (first, _) = Ledger(store.engine).rows(CYCLES)
    assert first.state in ("promoted", "rolled_back"), ran.stdout
    selection = store.used(1)
    joined = store.joined(selection.ids, selection.watermark)
    assert len(joined) == first.answers >= LEAST
    documents = [max(answer.kinds) for answer, _ in joined if answer.kinds]
    assert documents and max(documents) == 3  # the files of a want
    version = checkpoint.record_of(tmp_path / "versions/1", 1).position
    assert version["first/policy/mismatch_max"] < 1e-4 and version["left_out"] == 0
    assert [*(tmp_path / "documents").glob("*/*.keys")]
    store.close()


@pytest.mark.long
def test_a_cycle_of_jumps_with_everything_real(tmp_path):
    """People carry changes through several files, and what became of jumps is trained on."""
    ran = programs.run(*command(tmp_path, "realtime_jumps", "jumpers"), devices=None)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    store = FeedbackStore(f"sqlite:///{tmp_path}/people.db")
    (first, _) = Ledger(store.engine).rows(CYCLES)
    assert first.state in ("promoted", "rolled_back")
    selection = store.used(1)
    joined = store.joined(selection.ids, selection.watermark)
    assert len(joined) == first.answers >= LEAST
    assert {answer.kind for answer, _ in joined} == {"completion"}
    # a page of a session has the edit that was made after the page before
    assert len({answer.session for answer, _ in joined}) < len({a.id for a, _ in joined})
    # what has learned nothing says places seldom, and few of them are right
    kinds = {event.kind for _, happened in joined for event in happened}
    assert kinds <= {"shown", "accepted", "rejected"}
    assert store.refusals() == {}
    store.close()
