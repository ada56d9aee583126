#!/usr/bin/env bash
# Runs the test suite in two processes: bash launch/test.sh [arguments of pytest, as in -k config].
set -euo pipefail
# Tests compile much and compute little: compiler threads would wait for each other in the one arena of other runs.
export GLIBC_TUNABLES=${GLIBC_TUNABLES-glibc.malloc.mmap_threshold=8589934592:glibc.malloc.trim_threshold=8589934592}
source "$(dirname "${BASH_SOURCE[0]}")/set_up.sh"

exec python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
