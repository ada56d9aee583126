"""Dumps of other trainers for tests.

Those of prime-rl and verifiers were made by the package verifiers itself (``make_traces.py``). TRL's
tables and verl's lines are written here as the packages' sources write them (TRL 1.16, method
``log`` of ``GRPOTrainer``; verl 0.9, ``_write_generations``): both packages need torch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from rl_code.foreign.formats import find_format
from rl_code.foreign.importing import Imported, Settings, import_run
from rl_code.foreign.tokens import Encoder, byte_tokenizer
from rl_code.run.workdir import STORE
from rl_code.store.store import GroupStore
from rl_code.types import Group

DATA = Path(__file__).parent / "data"
PROMPTS = ("Write double(x).", "Write square(x).")


def answers(step: int, group: int) -> list[str]:
    """The completions of a group."""
    return [f"step {step}: def f(x): return x * {2 + group}  # é {i}" for i in range(2)]


def verl(folder: Path, steps=(1, 2, 3), change: Callable[[dict], None] = lambda row: None) -> Path:
    """verl's lines. change: edits a row."""
    folder.mkdir(parents=True)
    for step in steps:
        rows = []
        for group, prompt in enumerate(PROMPTS):
            for i, output in enumerate(answers(step, group)):
                row = {"input": prompt, "output": output, "gts": str(group), "score": float(i)}
                row |= {"step": step, "acc": bool(i), "uid": f"s{group}_{i}_0"}
                change(row)
                rows.append(row)
        lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows]
        (folder / f"{step}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def trl(folder: Path, steps=(10, 20), chat: bool = False, change: Any = None, **columns) -> Path:
    """TRL's tables. change: step, group and index of a completion that is another one."""
    folder.mkdir(parents=True)
    for step in steps:
        rows = [
            (prompt, text + (" IndexError" if change == (step, group, i) else ""), float(i))
            for group, prompt in enumerate(PROMPTS)
            for i, text in enumerate(answers(step, group))
        ]
        table = {
            "step": [step] * len(rows),
            "prompt": [[message("user", p)] if chat else p for p, _, _ in rows],
            "completion": [conversation(c) if chat else c for _, c, _ in rows],
            "tests_reward": [score for _, _, score in rows],
            **{name: [value] * len(rows) for name, value in columns.items()},
            "advantage": [score - 0.5 for _, _, score in rows],
        }
        parquet.write_table(pyarrow.table(table), folder / f"completions_{step:05d}.parquet")
    return folder


def message(role: str, content: str) -> dict:
    """A chat message."""
    return {"role": role, "content": content}


def conversation(text: str) -> list[dict]:
    """A completion with a call of a tool and its result."""
    call = {"type": "function", "function": {"name": "run", "arguments": '{"fast": true}'}}
    return [
        {**message("assistant", text), "tool_calls": [call]},
        {**message("tool", "1 failed"), "name": "run"},
        message("assistant", "done"),
    ]


def tokenizer(folder: Path) -> Path:
    """The tokenizer of the traces."""
    byte_tokenizer().save(folder / "tokenizer.json")
    return folder


def changed_prime_rl(folder: Path) -> Path:
    """The run ``prime_rl_a`` with the last step of ``prime_rl_b``."""
    shutil.copytree(DATA / "prime_rl_a", folder)
    return shutil.copytree(DATA / "prime_rl_b", folder, dirs_exist_ok=True)


def read(
    format: str, path: Path, workdir: Path, tokenizer: Path | None = None, **settings: Any
) -> Imported:
    """Imports a dump. settings: of the format."""
    own = Settings(format, settings, Encoder.read(tokenizer))
    return import_run(find_format(format, settings), [path], workdir, own)


def groups(workdir: Path, step: int) -> list[Group]:
    """The groups of a step on record."""
    return [record.group for record in GroupStore(workdir / STORE).read(step)]
