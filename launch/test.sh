#!/usr/bin/env bash
# Runs the tests, in one process more than there are cores.
#
#   bash launch/test.sh [--all] [arguments of pytest, as in -k config or --costs=30]
#
# Without --all the tests that are marked long are left out: they kill processes, train for minutes,
# or try every combination of what the other tests try a part of. --costs shows the tests and files
# with the most CPU seconds.
case "${1-}" in -h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
    ;;
esac
set -euo pipefail
# Tests compile much and compute little: compiler threads would wait for each other in the one
# arena that other runs have.
export GLIBC_TUNABLES=${GLIBC_TUNABLES-glibc.malloc.mmap_threshold=8589934592:glibc.malloc.trim_threshold=8589934592}
# Threads of OpenBLAS, one for each core in each of the processes, would wait for work by spinning.
export OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS-1}
# Hundreds of processes import the same files: what one has compiled the others read.
unset PYTHONDONTWRITEBYTECODE
REQUIREMENTS="requirements.txt requirements/test.txt requirements/data.txt requirements/ray.txt requirements/postgres.txt"
source "$(dirname "${BASH_SOURCE[0]}")/set_up.sh"

which=(-m "not long")
if [ "${1-}" = --all ]; then
    which=()
    shift
fi
# A process that dies ends the run, with its test among the failures: pytest-xdist 3.8.0 may wait
# forever behind one that it starts again. How tests are shared among workers: tests/conftest.py.
exec python -m pytest -n auto --dist loadscope --no-loadscope-reorder --max-worker-restart=0 \
    "${which[@]}" "$@"
