#!/usr/bin/env bash
# Starts a command again whenever it dies, until it ends well or its command line or config is wrong.
#   bash launch/supervise.sh python -m launch.train --role=actor --name=actor-0 --config=... --workdir=...
# SUPERVISE_MAX (default 1000) bounds the restarts, SUPERVISE_PAUSE_S (default 1) is waited before each.
set -u
child=
stopping=
trap 'stopping=1; [ -n "$child" ] && kill -TERM "$child" 2>/dev/null' TERM INT
for ((restarts = 0; ; restarts++)); do
    "$@" &
    child=$!
    [ -n "$stopping" ] && kill -TERM "$child" # the signal came before there was anyone to pass it on to
    wait "$child"
    code=$?
    while kill -0 "$child" 2>/dev/null; do # the wait was interrupted by a signal that was passed on
        wait "$child"
        code=$?
    done
    child=
    if [ "$code" -eq 0 ] || [ "$code" -eq 2 ] || [ -n "$stopping" ]; then
        exit "$code"
    fi
    if ((restarts >= ${SUPERVISE_MAX:-1000})); then
        echo "supervise: exit code $code, given up after $restarts restarts" >&2
        exit 1
    fi
    echo "supervise: exit code $code, starting again: $*" >&2
    sleep "${SUPERVISE_PAUSE_S:-1}"
    [ -n "$stopping" ] && exit "$code"
done
