"""Changes as gaps and bits: every array comes back, and what is no change is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_code.weights import sparse

U16 = np.dtype(np.uint16)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1200), st.integers(1, 2**16 - 1))), st.integers(0, 900))
def test_every_change_comes_back(elements, behind):
    # gaps of every length, in pieces that cut some of them
    parts = [np.array([0] * gap + [bits], np.uint16) for gap, bits in elements]
    change = np.concatenate([np.zeros(0, np.uint16), *parts, np.zeros(behind, np.uint16)])
    for piece in (700, sparse._PIECE):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sparse, "_PIECE", piece)
            stored = sparse.encode(change)
            found = sparse.decode(stored, change.shape, U16)
        np.testing.assert_array_equal(found, change)
        # a byte for each gap of up to 254, and the two of each element
        pieces = -(-change.size // piece)
        most = sum(1 + gap // 255 for gap, _ in elements) + pieces
        assert len(stored) <= 8 * (1 + 2 * pieces) + most + 2 * len(elements)


def test_what_is_no_change_is_refused():
    change = np.zeros((3, 100), np.uint16)
    change[1, 5] = 7
    stored = sparse.encode(change)
    np.testing.assert_array_equal(sparse.decode(stored, (3, 100), U16), change)
    for wrong in (stored[:0], stored[:-1], np.append(stored, stored[:1])):
        with pytest.raises(ValueError, match=r"bytes are no change of uint16\[3, 100\]"):
            sparse.decode(wrong, (3, 100), U16)
    with pytest.raises(ValueError, match="1 changed elements of 100 have 1 places"):
        sparse.decode(stored, (2, 50), U16)
