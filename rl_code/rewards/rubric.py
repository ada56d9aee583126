"""Reward by a rubric: a model answers yes or no to stated criteria about the work.

The judge is any server that speaks OpenAI's chat API, or without a URL the policy itself, whose
most likely next token after each question is its answer (``run.asking``). It sees the task's
messages and the change of the files, never the trajectory: all that the agent says about its work
would be advertising. The signal is the weighted share of criteria whose answer is the wanted one.

    dict(
        name="rubric", url="http://127.0.0.1:8000/v1", model="judge", key_variable="JUDGE_KEY",
        criteria=(
            dict(name="minimal", question="Does the change leave alone what it need not touch?"),
            dict(name="special", question="Does it special-case inputs of tests?", wanted=False),
        ),
        weight=0.3,
    )

``judging`` says why the candidate's text cannot instruct the judge, and how strictly its answer is
read. What is no answer earns nothing and is counted: the measure ``answered``, and the note
``failure``, which says why. The answers go on record (``noted``), so a trajectory that is played
again is paid by them and nobody is asked. Equal requests of a process are asked once.

It departs from papers with rubrics (such as 2507.17746) in that no criterion is graded on a scale:
yes and no can be read strictly and compared between judges.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Literal

from absl import logging

from rl_code.config.read_config import ConfigError, at_least
from rl_code.environment.finished import FinishedEpisode
from rl_code.environment.tools.text import cut_middle
from rl_code.harness.chat_server import EndpointError, Server
from rl_code.rewards.differing import reference_diff, work_diff
from rl_code.rewards.judging import Request, cut, request, texts_of
from rl_code.rewards.noted import MEASURES, Noted

# The answers by criterion, or None; why there are none; and the judge's message.
type Answer = tuple[Mapping[str, bool] | None, str, str]

# Characters of a judge's message that are kept.
_KEPT = 2000
# Requests of one process whose answers are remembered.
_REMEMBERED = 4096


@dataclasses.dataclass(frozen=True)
class Criterion:
    """A yes-or-no question about the work."""

    # Name of its metric, reward/<signal>/<name>.
    name: str
    # The question as the judge reads it.
    question: str
    # The answer that is paid: yes or no.
    wanted: bool = True
    # Its share of the reward, relative to the others.
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name == "answered":
            raise ValueError(f"name={self.name!r} must be a word, and not 'answered'")
        if not self.question.strip() or not self.question.isprintable():
            raise ValueError(f"question={self.question!r} must be a line of text")
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"{self.name}: weight={self.weight} must be above 0 and finite")


@dataclasses.dataclass(frozen=True)
class Rubric:
    """0 to 1: the weighted share of criteria that a judge answers as wanted."""

    criteria: tuple[Criterion, ...]
    # Base URL of the judge, with /v1 where the server has it; "" for the policy itself.
    url: str = ""
    # Its name there.
    model: str = ""
    # Tokens of a question with all that is shown, where the policy itself is asked.
    tokens: int = 1024
    # Variable of the environment that holds the key; "" for a server that wants none. No config
    # holds a key.
    key_variable: str = ""
    # Work that is judged: what was handed in without a proof of cheating, or of it only what passes
    # the tests. Other work earns 0 and is not shown to the judge.
    of: Literal["submitted", "solved"] = "submitted"
    # True if the judge also sees the change of the task's reference.
    sees_reference: bool = False
    # Characters of the task and of each change that are shown at most.
    longest: int = 20_000
    # Whether two questions with known answers are asked, too, which a judge must get right.
    controls: bool = True
    # Seconds for one answer, and for all attempts of one work.
    timeout_s: float = 30.0
    deadline_s: float = 90.0
    # How often is asked where an answer does not come, and seconds before the second attempt. An
    # answer that cannot be read is not asked for again: it is the judge's.
    attempts: int = 3
    pause_s: float = 1.0
    # Requests of this process that are on their way to the server at once.
    concurrent: int = 8
    # Tokens of the judge's message, its thoughts included.
    max_tokens: int = 1024
    # Sampling of the judge. Not every server repeats its answer even at 0, so answers are recorded.
    temperature: float = 0.0

    def __post_init__(self) -> None:
        names = [criterion.name for criterion in self.criteria]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"criteria {names} must be there and have names of their own")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url={self.url!r} must begin with http:// or https://")
        if bool(self.url) != bool(self.model) or (self.key_variable and not self.url):
            raise ValueError(
                f"url={self.url!r}, model={self.model!r}, key_variable={self.key_variable!r}: a "
                "server has a URL and a model, and the policy itself none of the three"
            )
        at_least(self, tokens=1, longest=1, attempts=1, concurrent=1, max_tokens=1)
        if not 0 < self.timeout_s <= self.deadline_s < 120:
            raise ValueError(
                f"0 < {self.timeout_s=} <= {self.deadline_s=} < 120 must hold: work whose grading "
                "takes two minutes more than the limits say ends the run"
            )
        if not self.pause_s >= 0 or not self.temperature >= 0:
            raise ValueError(f"{self.pause_s=} and {self.temperature=} must be at least 0")

    @property
    def asks_policy(self) -> bool:
        """True if the policy itself is the judge."""
        return not self.url

    def __call__(self, episode: FinishedEpisode) -> Noted | float:
        """The signal of a finished episode. Raises SandboxFault, and ConfigError where the
        environment has no key.
        """
        grade = episode.grade
        if not (grade.solved if self.of == "solved" else grade.submitted and not grade.cheated):
            return 0.0
        asked = self._request(episode)
        if asked is None:
            return self._paid(None, "too_large", "")
        digest = asked.digest(self.model, self._settings())
        for notes in episode.recorded.values():
            if notes.get("asked") == digest:
                return self._paid(notes.get("answers"), notes.get("failure", ""), digest, notes)
        if not self.url:
            if episode.policy is None:
                raise ConfigError("rubric without a url asks the policy, which only a run has")
            tokens = episode.policy(asked.alone, self.tokens)
            answers, failure = asked.read_tokens(tokens)
            words = " ".join(str(token) for token in tokens)
            return self._paid(answers, failure, digest, {"said": cut_middle(words, _KEPT)})
        answers, failure, said = _ANSWERS.of(digest, lambda: self._ask(asked))
        return self._paid(answers, failure, digest, {"said": said})

    def _request(self, episode: FinishedEpisode) -> Request | None:
        """The request; None for a change that is too large to be shown."""
        task = cut(texts_of(episode.task.messages), self.longest)
        blocks = {"TASK": task}
        work = work_diff(episode)
        if work is None:
            return None
        if self.sees_reference:
            reference = reference_diff(episode.task, episode.sandboxes)
            blocks["REFERENCE"] = cut(reference or "(none)", self.longest)
        blocks["WORK"] = cut(work or "(no file was changed)", self.longest)
        questions = {criterion.name: criterion.question for criterion in self.criteria}
        return request(blocks, questions, self.controls)

    def _settings(self) -> dict[str, Any]:
        """The part of the request that says how the judge answers."""
        return {"temperature": self.temperature, "max_tokens": self.max_tokens, "seed": 0}

    def _ask(self, asked: Request) -> Answer:
        """Asks the judge."""
        begin = time.monotonic()
        gate = _gate(self.url, self.concurrent)
        if not gate.acquire(timeout=self.deadline_s):
            return None, "no_turn", ""
        try:
            left_s = self.deadline_s - (time.monotonic() - begin)
            body = {"messages": list(asked.messages), **self._settings()}
            answer = self._server().ask(body, left_s)
        except EndpointError as error:
            logging.log_every_n_seconds(logging.WARNING, "a judge does not answer: %s", 30, error)
            return None, "unreachable", cut_middle(str(error), _KEPT)
        finally:
            gate.release()
        if answer is None:
            return None, "too_long", ""
        try:
            choice = answer["choices"][0]
            text, ended = choice["message"]["content"], choice.get("finish_reason")
        except (KeyError, IndexError, TypeError, AttributeError):
            return None, "no_message", ""
        if not isinstance(text, str) or ended == "length":
            return None, "cut" if ended == "length" else "no_message", ""
        answers, failure = asked.read(text)
        return answers, failure, cut_middle(text, _KEPT)

    def _server(self) -> Server:
        """The judge. Raises ConfigError where the environment has no key."""
        key = os.environ.get(self.key_variable, "") if self.key_variable else ""
        if self.key_variable and not key:
            raise ConfigError(
                f"rubric(key_variable={self.key_variable!r}): the environment has no such "
                "variable; set it to the key of the judge"
            )
        return Server(self.url, self.model, key, self.timeout_s, self.attempts, self.pause_s)

    def _paid(
        self,
        answers: Mapping[str, bool] | None,
        failure: str,
        digest: str,
        notes: Mapping[str, Any] | None = None,
    ) -> Noted:
        """The value of answers with its notes; 0 for none."""
        said = (notes or {}).get("said", "")
        if answers is None:
            measures = {"answered": 0.0}
            kept = {"asked": digest, "failure": failure, "said": said, MEASURES: measures}
            return Noted(0.0, kept)
        wanted = [one.weight * (answers[one.name] == one.wanted) for one in self.criteria]
        value = sum(wanted) / sum(one.weight for one in self.criteria)
        measures = {one.name: float(answers[one.name]) for one in self.criteria} | {"answered": 1.0}
        return Noted(
            value, {"asked": digest, "answers": dict(answers), "said": said, MEASURES: measures}
        )


class _Answers:
    """The newest answers of this process by digest, for works that are equal."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: collections.OrderedDict[str, Future[Answer]] = collections.OrderedDict()

    def of(self, digest: str, ask: Callable[[], Answer]) -> Answer:
        """The answer to a request. Whoever comes first asks, and others who come meanwhile wait for
        the same answer. A failure is told to those who wait, and not remembered.
        """
        with self._lock:
            future = self._found.get(digest)
            first = future is None
            if future is None:
                future = self._found[digest] = Future()
                if len(self._found) > _REMEMBERED:
                    self._found.popitem(last=False)
        if first:
            try:
                future.set_result(ask())
            except BaseException as error:
                future.set_exception(error)
            if future.exception() is not None or future.result()[0] is None:
                with self._lock:
                    self._found.pop(digest, None)
        return future.result()


_ANSWERS = _Answers()


@functools.cache
def _gate(url: str, concurrent: int) -> threading.BoundedSemaphore:
    """Bounds the requests that are on their way to a server."""
    return threading.BoundedSemaphore(concurrent)
