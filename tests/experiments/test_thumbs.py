"""The study of thumbs."""

from __future__ import annotations

import numpy as np

from experiments.thumbs.study import RUNS, ThumbsStudy, run


def test_thumbs_lose_what_is_kept_where_voters_differ_alone():
    study = ThumbsStudy(steps=60)
    kept = {name: run(study, name, seed=0).retained for name in RUNS}
    last = {name: float(np.mean(values[-10:])) for name, values in kept.items()}
    assert last["retention"] > 0.75 and last["thumbs, all vote alike"] > 0.75
    assert last["thumbs, voters differ"] < 0.5
    assert all(0.4 < values[0] < 0.65 for values in kept.values())
