#!/usr/bin/env bash
# Runs the test suite in two processes: bash launch/test.sh [arguments of pytest, as in -k config].
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/set_up.sh"

exec python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
