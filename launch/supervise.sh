#!/usr/bin/env bash
# Starts a command again whenever it dies, until it ends well or its command line or config is wrong.
#   bash launch/supervise.sh python -m launch.train --role=actor --name=actor-0 --config=... --workdir=...
# SUPERVISE_MAX (default 1000) bounds the restarts, SUPERVISE_PAUSE_S (default 1) is waited before each.
set -u
child=
trap '[ -n "$child" ] && kill -TERM "$child" 2>/dev/null; stopping=1' TERM INT
stopping=
for ((restarts = 0; restarts <= ${SUPERVISE_MAX:-1000}; restarts++)); do
    "$@" &
    child=$!
    wait "$child"
    code=$?
    while kill -0 "$child" 2>/dev/null; do # the wait was interrupted by a signal that was passed on
        wait "$child"
        code=$?
    done
    if [ "$code" -eq 0 ] || [ "$code" -eq 2 ] || [ -n "$stopping" ]; then
        exit "$code"
    fi
    echo "supervise: exit code $code, starting again: $*" >&2
    sleep "${SUPERVISE_PAUSE_S:-1}"
done
echo "supervise: given up after ${SUPERVISE_MAX:-1000} restarts" >&2
exit 1
