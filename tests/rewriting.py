"""Compiled test files, with pytest's asserts, of which each worker makes a part.

In a fresh clone every worker would compile all of them, at the same time and in the same order.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def rewrite_a_share(config: pytest.Config) -> None:
    """Writes what is missing or old of every n-th test file, where n workers collect all files."""
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    if not (worker := getattr(config, "workerinput", None)):
        return
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    folder = Path(__file__).resolve().parent
    for path in sorted(folder.rglob("test_*.py"))[number::count]:
        cache = rewrite.get_cache_dir(path)
        compiled = cache / (path.stem + rewrite.PYC_TAIL)
        if rewrite._read_pyc(path, compiled) is None and rewrite.try_makedirs(cache):
            stat, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, stat, compiled)
