"""A program that prints what it was given, and ends with exit code 3 or waits to be killed."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import jax

if __name__ == "__main__":
    shown = dict(
        words=sys.argv[1:],
        program=Path(sys.argv[0]).name,
        folder=os.getcwd(),
        flags=os.environ["XLA_FLAGS"],
        mine=os.environ.get("MINE"),
        cache=jax.config.jax_compilation_cache_dir,
        least=jax.config.jax_persistent_cache_min_compile_time_secs,
        x64=jax.config.jax_enable_x64,
        devices=jax.device_count(),
        leads=os.getsid(0) == os.getpid(),
        asked=sys.stdin.read() if "read" in sys.argv else "",
    )
    print("an error", file=sys.stderr, flush=True)
    print(json.dumps(shown), flush=True)
    if "wait" in sys.argv:
        time.sleep(600)
    sys.exit(3)
