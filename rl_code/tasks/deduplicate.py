"""Finds near-duplicates between sets of tasks: tasks that ask for the same function must not be
both in training and in a test.

Two tasks are near-duplicates when their descriptions share most of their words, or when their
references share most of their token 4-grams after renaming. Words that every task uses do not
count, and neither does code that is too short to tell tasks apart.
"""

from __future__ import annotations

import ast
import dataclasses
import io
import keyword
import re
import token
import tokenize
import warnings
from collections.abc import Sequence

from rl_code.text import python_source
from rl_code.types import Task

_STOP_WORDS = frozenset(
    "a an and are as at be by can check each find for from function get given give if in is it "
    "lambda of on or python "
    "regex return should that the then this to use using whether with write".split()
)
_SYNONYMS = {"array": "list", "integer": "number"}
_NGRAM = 4
_MIN_NGRAMS = 16
_MIN_WORDS = 2


@dataclasses.dataclass(frozen=True)
class DuplicateConfig:
    """words, code: Jaccard similarity in (0, 1] of descriptions and of references from which two
    tasks count as one.
    """

    words: float
    code: float


@dataclasses.dataclass(frozen=True)
class Duplicate:
    """A pair found: ids, and the two similarities."""

    task: str
    other: str
    words: float
    code: float


def near_duplicates(
    tasks: Sequence[Task], others: Sequence[Task], config: DuplicateConfig
) -> list[Duplicate]:
    """For each task that has a near-duplicate among ``others`` (other than itself), the most
    similar one.

    Tasks are described by ``meta["description"]``, or by their messages where it is missing, and by
    their reference.
    """
    known = [(other.id, words_of(_description(other)), code_of(other)) for other in others]
    found = []
    for task in tasks:
        words = words_of(_description(task))
        code = code_of(task)
        pairs = [
            (
                _jaccard(words, other_words, _MIN_WORDS),
                _jaccard(code, other_code, _MIN_NGRAMS),
                other_id,
            )
            for other_id, other_words, other_code in known
            if other_id != task.id
            and (
                _may_reach(words, other_words, config.words)
                or _may_reach(code, other_code, config.code)
            )
        ]
        pairs = [pair for pair in pairs if pair[0] >= config.words or pair[1] >= config.code]
        if pairs:
            best = max(pairs, key=lambda pair: max(pair[:2]))
            found.append(Duplicate(task.id, best[2], best[0], best[1]))
    return found


def _description(task: Task) -> str:
    if "description" in task.meta:
        return task.meta["description"]
    return " ".join(str(message["content"]) for message in task.messages)


def words_of(description: str) -> frozenset[str]:
    """The description's content words, without plural endings."""
    words = re.findall(r"[a-z]+|[0-9]+", description.lower())
    content = {_stem(word) for word in words if word not in _STOP_WORDS} - _STOP_WORDS
    return frozenset(_SYNONYMS.get(word, word) for word in content)


def code_of(task: Task) -> frozenset[tuple[str, ...]]:
    """Token 4-grams of the reference without comments and docstrings, its own names numbered in
    order of appearance.
    """
    grams: set[tuple[str, ...]] = set()
    for text in task.reference.values():
        tokens = _tokens(text)
        grams.update(zip(*(tokens[i:] for i in range(_NGRAM)), strict=False))
    return frozenset(grams)


def _stem(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def _may_reach(a: frozenset, b: frozenset, threshold: float) -> bool:
    """True if sets of these sizes can be as similar as the threshold."""
    return min(len(a), len(b)) >= threshold * max(len(a), len(b))


def _jaccard(a: frozenset, b: frozenset, least: int) -> float:
    """Similarity of two sets; 0 when either has fewer than ``least`` elements."""
    if min(len(a), len(b)) < least:
        return 0.0
    shared = len(a & b)
    return shared / (len(a) + len(b) - shared)


def _tokens(text: str) -> list[str]:
    """The code's tokens as written by Python's own printer; of code that does not parse, its
    words.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            tree = python_source.parse(text)
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
                    node.body = node.body[1:] or [ast.Pass()]
            printed = python_source.unparse(tree)
        except SyntaxError:
            return text.split()
        attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        numbers: dict[str, str] = {}
        tokens = []
        for item in tokenize.generate_tokens(io.StringIO(printed).readline):
            if (
                item.type == token.NAME
                and not keyword.iskeyword(item.string)
                and item.string not in attributes
            ):
                tokens.append(numbers.setdefault(item.string, f"v{len(numbers)}"))
            elif item.string.strip():
                tokens.append(item.string)
    return tokens
