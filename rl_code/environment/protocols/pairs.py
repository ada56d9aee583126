"""Tags around calls whose text is not escaped, so that it may hold the same tags.

Where all tags can be paired, pairs inside of a call belong to its text. Where they cannot, the
last one of several ends that follow each other ends the call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Tag:
    """The beginning or the end of a call, or both."""

    # Places in the text where the tag begins and ends.
    start: int
    end: int
    opens: bool
    closes: bool
    name: str = ""


def ends_of(tags: Sequence[Tag]) -> tuple[list[int | None], bool]:
    """For each tag that only opens a call the index of the tag that closes it, None where none
    does; and whether all tags are paired.
    """
    paired = _paired(tags)
    return (_last_of_several(tags), False) if paired is None else (paired, True)


def _paired(tags: Sequence[Tag]) -> list[int | None] | None:
    """The first part of ``ends_of``; None where the tags cannot be paired."""
    ends: list[int | None] = [None] * len(tags)
    opened: list[int] = []
    for place, tag in enumerate(tags):
        if tag.opens and not tag.closes:
            opened.append(place)
        elif tag.closes and not tag.opens:
            if not opened:
                return None
            ends[opened.pop()] = place
    return None if opened else ends


def _last_of_several(tags: Sequence[Tag]) -> list[int | None]:
    """The first part of ``ends_of``: the next end that no other end follows."""
    ends: list[int | None] = [None] * len(tags)
    following: int | None = None
    for place in reversed(range(len(tags))):
        ends[place] = following
        tag = tags[place]
        last = place + 1 == len(tags) or tags[place + 1].opens
        if tag.closes and not tag.opens and last:
            following = place
    return ends
