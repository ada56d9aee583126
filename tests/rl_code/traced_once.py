"""Makers of a run's programs that trace once what equal arguments ask for.

Each takes arguments that compare by value, and what it makes keeps no state of its own.
"""

from __future__ import annotations

import functools

from rl_code import sft
from rl_code.learner import learner as learner_lib
from rl_code.run import run as run_lib

# (module, name there) -> the maker in its place.
MAKERS = {
    (run_lib, "Engine"): functools.cache(run_lib.Engine),
    (run_lib, "make_random_model"): functools.cache(run_lib.make_random_model),
    (learner_lib, "make_update"): functools.cache(learner_lib.make_update),
    (learner_lib, "make_token_logprobs"): functools.cache(learner_lib.make_token_logprobs),
    (sft, "make_sft_update"): functools.cache(sft.make_sft_update),
}
