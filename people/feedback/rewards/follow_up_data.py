"""Follow-up messages that are made, to train and judge the classifier of ``follow_up.py``.

There is no corpus of what people write after an agent's answer at hand, so messages are made of
templates. This makes the task easier than real messages are: see there what that means for the
numbers. Templates come in *families*, each another way to say something. Whole families are held
out, so that a classifier is judged on ways to say it that it has never seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class Message:
    """A message that follows an answer."""

    text: str
    dissatisfied: bool
    family: str


# Family -> its templates. Words in braces are filled in from ``_WORDS``.
DISSATISFIED: Mapping[str, tuple[str, ...]] = {
    "wrong": (
        "that's wrong, {thing} {fails}",
        "no, this is not correct: {thing} {fails}",
        "this is wrong. {thing} should {do}",
        "not what i meant, i wanted it to {do}",
        "you got {thing} wrong",
    ),
    "still": (
        "{thing} still {fails}",
        "still broken, same {error}",
        "it still doesn't {do}, and i get the same {error} as before",
        "nope, same problem again with {thing}",
        "again {error}. i told you that before",
    ),
    "undo": (
        "undo that",
        "revert {thing} to what it was",
        "please put {thing} back, it worked before",
        "take that back, now {thing} {fails}",
        "roll back your last change, it broke {thing}",
    ),
    "ignored": (
        "i asked you to {do}, why did you change {thing}?",
        "i said {do}, nothing else",
        "why did you touch {thing}? i never asked for that",
        "you ignored what i said about {thing}",
        "read my message again, i asked to {do}",
    ),
    "useless": (
        "this is useless, i'll {do} myself",
        "forget it, i will fix {thing} by hand",
        "this doesn't help at all",
        "waste of time. {thing} is worse than before",
        "never mind, i'll ask somebody else about {thing}",
    ),
    "broke": (
        "now {thing} {fails}",
        "you broke {thing}, {error} everywhere",
        "after your change {thing} {fails}",
        "your edit made {thing} crash with {error}",
        "this made it worse: {thing} {fails} now",
    ),
    "doubt": (
        "are you sure? {thing} {fails}",
        "hm, that can't be right, {thing} {fails}",
        "did you even run it? i get {error}",
        "did you test {thing}? because it {fails}",
        "really? that does not {do}",
    ),
}
SATISFIED: Mapping[str, tuple[str, ...]] = {
    "thanks": (
        "thanks, that works",
        "great, {thing} works now",
        "perfect, thank you",
        "nice, exactly what i wanted for {thing}",
        "works, no {error} any more",
    ),
    "next": (
        "now {do} as well",
        "next, {do} in {thing}",
        "ok. then let's {do}",
        "now do the same for {thing}",
        "good, can you also {do}?",
    ),
    "task": (
        "{thing} {fails}, please find out why",
        "there is {error} in {thing}, can you look into it?",
        "please make {thing} {do}",
        "users report {error} in {thing}. where does it come from?",
        "can you {do}? {thing} should stay as it is",
    ),
    "question": (
        "how does {thing} work?",
        "what does {error} mean here?",
        "why do we need {thing} at all?",
        "which file has {thing}?",
        "is there a reason not to {do}?",
    ),
    "commit": (
        "commit this and open a pull request",
        "looks good, merge it",
        "ship it",
        "add a test for {thing} and commit",
        "fine with me, push it to the branch",
    ),
    "detail": (
        "call it {thing} instead, the rest is fine",
        "one small thing: {do}, then we are done",
        "good. could you add a comment to {thing}?",
        "almost there, only {do} is left",
        "yes, and mention {thing} in the docs",
    ),
    "answer": (
        "yes, please {do}",
        "the second one, {do}",
        "both. start with {thing}",
        "no need, leave {thing} alone and go on",
        "right, {thing} is the one i mean",
    ),
}

# Whole families that a classifier never sees: to set its temperature, and to judge it.
VALIDATION = ("ignored", "question")
HELD_OUT = ("doubt", "broke", "task", "detail")

_WORDS: Mapping[str, tuple[str, ...]] = {
    "thing": (
        *("the parser", "the login page", "the cache", "the date filter", "the config loader"),
        *("the export", "my unit test", "the retry loop", "the sidebar", "the build"),
        *("parse_args", "UserModel", "the migration", "utils.py", "the api client", "the index"),
    ),
    "fails": (
        *("fails", "crashes", "hangs", "returns none", "throws an exception", "doesn't compile"),
        *("shows the wrong total", "loses the last line", "is empty", "does nothing"),
    ),
    "error": (
        *("TypeError", "KeyError: 'id'", "a timeout", "the traceback", "a 500", "segfault"),
        *("an import error", "undefined is not a function", "the null pointer", "exit code 1"),
    ),
    "do": (
        *("sort by date", "keep the old names", "handle empty input", "add a flag", "use asyncio"),
        *("return a list", "log the request", "rename the function", "remove the dead code"),
        *("support windows paths", "split the file", "raise a clear error"),
    ),
}
_OPENINGS = ("", "", "", "hm, ", "ok ", "hey, ", "so ", "well, ")
_ENDINGS = ("", "", "", ".", "!", "...", " please", " :)", " ?")


def messages(families: tuple[str, ...], number: int, seed: int) -> list[Message]:
    """So many messages of some families, as many of each, in a random order."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(number):
        family = families[i % len(families)]
        dissatisfied = family in DISSATISFIED
        templates = (DISSATISFIED if dissatisfied else SATISFIED)[family]
        text = str(rng.choice(templates)).format_map(
            {kind: rng.choice(words) for kind, words in _WORDS.items()}
        )
        text = f"{rng.choice(_OPENINGS)}{text}{rng.choice(_ENDINGS)}"
        found.append(Message(text, dissatisfied, family))
    return [found[i] for i in rng.permutation(number)]


def training_families() -> tuple[str, ...]:
    """Families of texts that are neither for validation nor held out."""
    kept = (*VALIDATION, *HELD_OUT)
    return tuple(family for family in (*DISSATISFIED, *SATISFIED) if family not in kept)
