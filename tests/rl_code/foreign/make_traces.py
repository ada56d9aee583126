"""Makes ``data/prime_rl_*`` and ``data/verifiers_*`` with the package verifiers itself.

    python -m venv peer && peer/bin/pip install verifiers==0.4.0
    peer/bin/python tests/rl_code/foreign/make_traces.py tests/rl_code/foreign/data

Graphs are made by the package's own builder from prompts, completions and log-probabilities, and
written by its ``Episode.to_record`` and ``write_episode``. Tokens are the bytes of the texts. The
files of prime-rl are laid out as its file monitor does it; the package is in no registry.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import verifiers.v1 as vf
from verifiers.v1 import graph
from verifiers.v1.configs.agent import WireAgentConfig
from verifiers.v1.episode import (
    EnvInfo,
    GroupInfo,
    PolicySpan,
    TrainRunInfo,
    TrainWorkInfo,
)
from verifiers.v1.task import WireTaskData
from verifiers.v1.trace import AgentInfo, Trace, TraceTask, VersionInfo
from verifiers.v1.types import (
    AssistantMessage,
    Response,
    ToolCall,
    ToolMessage,
    TurnTokens,
    Usage,
    UserMessage,
)
from verifiers.v1.utils.trace_store import write_episode

TASKS = ("double", "square")


def rendered(message: object) -> bytes:
    """A message as bytes, in a template of this file's own."""
    return f"<{message.role}>{message.content or ''}</>".encode()


def turn(trace: Trace, prompt: list, text: str, rng: random.Random, tokens: bool, calls=None):
    """One call of the model: its answer goes into the graph."""
    message = AssistantMessage(content=text, tool_calls=calls)
    taken = None
    if tokens:
        spans, ids = [], []
        for one in prompt:
            begin = len(ids)
            ids += rendered(one)
            spans.append((begin, len(ids)))
        sampled = list(f"{text}</>".encode())
        taken = TurnTokens(
            prompt_ids=[*ids, *b"<assistant>"],
            completion_ids=sampled,
            completion_logprobs=[-rng.random() for _ in sampled],
            message_spans=spans,
        )
    usage = Usage(prompt_tokens=1, completion_tokens=1)
    graph.prepare_turn(trace, prompt).commit(
        Response(
            id="r",
            created=0,
            model="policy",
            message=message,
            finish_reason="stop",
            usage=usage,
            tokens=taken,
        )
    )
    return message


def episode(name: str, seed: int, number: int, tokens: bool, word: str = "") -> vf.Episode:
    """Two turns with a tool between them, and a branch that begins again from the prompt."""
    rng = random.Random(seed)
    data = WireTaskData(idx=TASKS.index(name), id=name, prompt=f"Write {name}(x).", answer=name)
    task = TraceTask(type="FunctionTask", data=data)
    agent = AgentInfo(config=WireAgentConfig(model="policy"))
    trace = Trace(
        id=f"{name}{seed:08}", verifiers=VersionInfo(version="0.4.0"), task=task, agent=agent
    )
    ask = UserMessage(content=data.prompt)
    calls = [ToolCall(id="c1", name="run_tests", arguments='{"fast": true}')]
    first = turn(
        trace, [ask], f"def {name}(x): return x{'*2' if number else ''}", rng, tokens, calls
    )
    told = ToolMessage(tool_call_id="c1", content=f"1 failed {word}".strip(), name="run_tests")
    turn(trace, [ask, first, told], f"submit {number}", rng, tokens)
    turn(trace, [ask, UserMessage(content="Summary: nearly done.")], "submit", rng, tokens)
    trace.record_reward("tests", float(number % 2), weight=1.0)
    trace.record_reward("brief", 0.5, weight=0.1)
    trace.record_metric("lines", 1.0)
    trace.ok = True
    trace.stop("agent_completed")
    # times are of no interest here
    trace.timing.start = 0.0
    for node in trace.nodes:
        node.timestamp = 0.0
    return vf.Episode(id=trace.id, env=EnvInfo(id="functions"), task=task, traces=[trace], ok=True)


def stream_of(trace: Trace, index: int) -> list[float]:
    """The trainer's log-probabilities of a branch: close to the sampler's, but for one token."""
    branch = trace.branches[index]
    mask = branch.sampled_mask
    values = [x - 0.01 if own else None for x, own in zip(branch.logprobs, mask, strict=True)]
    values[mask.index(True)] -= 1.5
    return values


def prime_rl(folder: Path, changed: bool) -> None:
    """Two steps of a run; ``changed`` has the last alone, with another answer of a tool."""
    for step in (2,) if changed else (1, 2):
        traces, notes, trainer = [], [], []
        for group, name in enumerate(TASKS):
            for number in range(2):
                word = "IndexError" if changed and (step, group, number) == (2, 1, 1) else ""
                made = episode(name, 100 * step + 10 * group + number, number, True, word)
                made.group = GroupInfo(id=f"{folder.name}-{step}-{group}")
                policy = PolicySpan(start=step - 1, end=step - 1)
                work = TrainWorkInfo(step=step, policy=policy)
                made.record_run(TrainRunInfo(id=folder.name, work=work))
                (trace,) = made.traces
                trace.info["kind"] = "train"
                traces.append(made.to_record())
                info = {"effective": True, "ship": {"step": step, "time": 0.0}, "advantage": 0.5}
                notes.append({"version": 1, "trace_id": trace.id, "info": info, "branches": []})
                streams = [
                    {"index": index, "trainer_logprobs": stream_of(trace, index)}
                    for index in range(len(trace.branches))
                ]
                trainer.append(
                    {"version": 1, "trace_id": trace.id, "info": {}, "branches": streams}
                )
        at = folder / "traces" / f"step_{step}" / "train"
        write(at / "traces.jsonl", traces)
        write(at / "annotations" / "orchestrator.jsonl", notes)
        write(at / "annotations" / "trainer.jsonl", trainer)


def write(path: Path, rows: list[dict]) -> None:
    """Writes a row a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def evaluation(folder: Path, order: int) -> None:
    """An evaluation through a chat API: no tokens. order: 1 or -1, in which episodes end."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "traces.jsonl").write_text("")
    made = [
        episode(name, 10 * group + number, number, False)
        for group, name in enumerate(TASKS)
        for number in range(2)
    ]
    for one in made[::order]:
        write_episode(folder, one)


def main() -> None:
    """Writes the folders."""
    out = Path(sys.argv[1])
    for name, changed in (("prime_rl_a", False), ("prime_rl_b", True)):
        prime_rl(out / name, changed)
    evaluation(out / "verifiers_a", 1)
    evaluation(out / "verifiers_b", -1)


if __name__ == "__main__":
    main()
