"""A first run once more, with one text for all copies of a test.

Honest code that passed a copy passes it again where all that ran before is the same, whatever the
other copies ask for; and where the same copy asks for a value that another one of them failed to
get, it fails. Who chooses among copies has nothing to choose by.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from rl_code.environment.suites.canaries import Drawn, function_of, with_name
from rl_code.environment.suites.source import Source


def repeat(drawn: Drawn, texts: Mapping[str, str]) -> Drawn:
    """The suite as it was drawn, but in some groups of a test and its canaries all have one text.

    texts: the suite's own id of a test -> the id, in this draw, of the copy whose text it is.
    """
    files = dict(drawn.files)
    for own, chosen in texts.items():
        path, names = function_of(chosen)
        source = Source(files[path])
        block = _block(source, names)
        places = {function_of(one)[1] for one in copies_of(drawn, own)}
        edits = []
        for place in places:
            node = source.function(place)
            assert node is not None
            edits.append((*source.lines(node), with_name(block, names[-1], place[-1])))
        data = source.data
        for start, end, text in sorted(edits, reverse=True):
            data = data[:start] + text + data[end:]
        files[path] = data.decode()
    return dataclasses.replace(drawn, files=files)


def copies_of(drawn: Drawn, own: str) -> list[str]:
    """Ids, in a draw, of a test and its canaries."""
    both = (*drawn.tests.items(), *drawn.canaries.items())
    return [one for one, other in both if other == own]


def _block(source: Source, names: tuple[str, ...]) -> bytes:
    node = source.function(names)
    assert node is not None
    start, end = source.lines(node)
    return source.data[start:end]
