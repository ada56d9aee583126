"""A first run once more, with one text for all copies of a test.

Honest code that passed a copy passes it again where all that ran before is the same, whatever the
other copies ask for; and where the same copy asks for a value that another one of them failed to
get, it fails. Who chooses among copies has nothing to choose by.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from rl_code.environment.suites.canaries import Drawn, function_of
from rl_code.environment.suites.copies import bare, with_name
from rl_code.environment.suites.source import SuiteFile


def repeat(drawn: Drawn, texts: Mapping[str, str]) -> Drawn:
    """The suite as it was drawn, but in some groups of a test and its canaries all have one text.

    texts: the suite's own id of a test -> the id, in this draw, of the copy whose text it is.
    """
    files = dict(drawn.files)
    for own, chosen in texts.items():
        path, names = function_of(chosen)
        source = SuiteFile(files[path])
        block = _block(source, names)
        places = {function_of(one)[1] for one in copies_of(drawn, own)}
        blocks = {place: with_name(block, names[-1], place[-1]) for place in places}
        files[path] = _with_blocks(source, blocks)
    return dataclasses.replace(drawn, files=files)


def put_in_place(
    drawn: Drawn, files: Mapping[str, str], ids: Sequence[str], texts: Mapping[str, str]
) -> Drawn:
    """The suite without copies, in which some tests have the texts that canaries of theirs had.

    files: path -> text of the suite's files of tests, and ``ids`` of all its tests. texts: the
    suite's own id of a test -> the id of its canary in the draw.
    """
    placed = dict(files)
    canaries = {}
    of_rows: dict[str, list[tuple[int, int, bytes]]] = {}
    for own, chosen in texts.items():
        if chosen in drawn.in_place:
            edit, label = drawn.in_place[chosen]
            of_rows.setdefault(function_of(own)[0], []).append(edit)
            canaries[f"{bare(own)}[{label}]"] = own
    for path, edits in of_rows.items():
        placed[path] = SuiteFile(files[path]).edited(edits)
    for own, chosen in texts.items():
        if chosen in drawn.in_place:
            continue
        path, names = function_of(chosen)
        function = function_of(own)
        block = with_name(_block(SuiteFile(drawn.files[path]), names), names[-1], function[1][-1])
        canaries |= {one: one for one in ids if function_of(one) == function}
        placed[path] = _with_blocks(SuiteFile(placed[path]), {function[1]: block})
    changed = set(canaries.values())
    return Drawn(placed, {one: one for one in ids if one not in changed}, canaries)


def copies_of(drawn: Drawn, own: str) -> list[str]:
    """Ids, in a draw, of a test and its canaries."""
    both = (*drawn.tests.items(), *drawn.canaries.items())
    return [one for one, other in both if other == own]


def apart(drawn: Drawn, tests: Iterable[str]) -> list[str]:
    """One test for each set of copies: those of one function share theirs, but for copied rows."""
    places = collections.defaultdict(set)
    for one, own in (*drawn.tests.items(), *drawn.canaries.items()):
        places[own].add(function_of(one))
    return list({frozenset(places[own]): own for own in tests}.values())


def _with_blocks(source: SuiteFile, blocks: Mapping[tuple[str, ...], bytes]) -> str:
    """A file's text with other texts of some functions."""
    edits = []
    for names, text in blocks.items():
        node = source.function(names)
        assert node is not None
        edits.append((*source.lines(node), text))
    return source.edited(edits)


def _block(source: SuiteFile, names: tuple[str, ...]) -> bytes:
    node = source.function(names)
    assert node is not None
    return source.block(node)
