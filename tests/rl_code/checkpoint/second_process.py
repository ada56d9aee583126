"""Opens the checkpoints of a workdir: ``python -m tests.rl_code.checkpoint.second_process <workdir>``."""

from __future__ import annotations

import sys

from rl_code.checkpoint.checkpoint import Checkpoints

if __name__ == "__main__":
    Checkpoints(sys.argv[1], {}, keep=1)
