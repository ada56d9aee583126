"""Recorded suggestions as tasks: holes in files, with what people kept there (``tasks.holes``).

A suggestion that was accepted, and of which all was alive at the last look, is taken for what its
person wanted. Nobody knows what was wanted where one was rejected, so these are counted and left
out. A suite of such holes is therefore of what earlier versions had right: it shows what a
candidate has unlearned, and not what it has learned.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models.tokenizer import Tokenizer
from people.feedback.records import AnswerRecord
from people.feedback.rewards.answered import answered
from people.feedback.rewards.retention import retention
from people.realtime.cases import SuiteRows, collected
from people.realtime.recorded import Joined
from rl_code.checkpoint import checkpoint
from rl_code.checkpoint.record import CheckpointError
from rl_code.environment.documents import OUTSIDE
from rl_code.harness.endpoint.chat_text import cut_at
from rl_code.harness.endpoint.completions import FillInTheMiddle
from rl_code.run.origin import kept_by
from rl_code.run.workdir import CONFIG_FILE


class Reader:
    """Reads what stood around a suggestion from the tokens of its record."""

    def __init__(self, tokenizer: Tokenizer, gaps: FillInTheMiddle):
        """gaps: as the server that gave the suggestions puts a gap."""
        self._tokenizer = tokenizer
        texts = gaps.prefix_text, gaps.suffix_text, gaps.middle_text
        self._marks = [tokenizer.encode(text) for text in texts]
        # what a model may end a suggestion with stands in none
        self._special = {
            id for text, id in tokenizer.vocabulary.items() if text in tokenizer.marks.texts
        }

    def row(self, answer: AnswerRecord) -> dict[str, str] | None:
        """The texts before and behind the gap, and what was suggested; None where there is no gap,
        or nothing was suggested.
        """
        given, at, texts = list(answer.given), 0, []
        if answer.kinds is not None:  # the hole is in the file, not in other files that were open
            pairs = zip(given, answer.kinds, strict=True)
            given = [token for token, kind in pairs if kind == OUTSIDE]
        for mark in self._marks:
            found = _place(given, mark, at)
            if found is None:
                return None
            texts.append(self._tokenizer.decode(given[at:found]))
            at = found + len(mark)
        said = self._tokenizer.decode([id for id in answer.tokens if id not in self._special])
        said = cut_at(said, answer.extra.get("stop", ()))
        if texts[0] or at < len(given) or not said.strip():
            return None
        return {"before": texts[1], "behind": texts[2], "wanted": said}


def _place(tokens: list[int], mark: list[int], start: int) -> int | None:
    """The first place of a mark's tokens from a place on; None where they are not there."""
    last = len(tokens) - len(mark)
    return next((at for at in range(start, last + 1) if tokens[at : at + len(mark)] == mark), None)


def reader(workdir: Path) -> Reader:
    """The reader for what the model of a workdir suggested. Raises ValueError."""
    gaps = _serving(workdir).get("fill_in")
    if gaps is None:
        raise ValueError(f"{workdir} serves no suggestions: its config has no serving.fill_in")
    tokenizer = Tokenizer.from_file(kept_by(workdir) / "tokenizer.json")
    return Reader(tokenizer, FillInTheMiddle(**gaps))


def _serving(workdir: Path) -> dict[str, Any]:
    """The section ``serving`` of a run, or of the versions of a cycle. Raises ValueError."""
    if (file := workdir / CONFIG_FILE).is_file():
        return json.loads(file.read_text()).get("serving", {})
    for folder in sorted((workdir / "versions").glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            return checkpoint.record_of(folder, int(folder.name)).config.get("serving", {})
        except CheckpointError:
            continue  # not whole
    raise ValueError(f"{workdir} has neither {CONFIG_FILE} nor a version of launch.realtime")


def hole_rows(joined: Joined, read: Reader, *, per_user: int, count: int, seed: int) -> SuiteRows:
    """Rows for the source ``holes``, of suggestions that people kept. The numbers are as of
    ``cases.suite_rows``.
    """
    pairs: list[tuple[str, dict[str, Any] | None]] = []
    suggested: Sequence[Any] = [one for one in answered(joined) if one.answer.kind == "completion"]
    for one in suggested:
        is_kept = retention(one) == 1.0 and one.answer.extra.get("store") is not False
        pairs.append((one.answer.user, read.row(one.answer) if is_kept else None))
    return collected(pairs, per_user=per_user, count=count, seed=seed)
