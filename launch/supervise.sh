#!/usr/bin/env bash
# Starts a command again whenever it dies, until it ends well or says that starting again does not help (exit code 2).
#   bash launch/supervise.sh python -m launch.train --role=actor --name=actor-0 --config=... --workdir=...
# SUPERVISE_MAX (default 1000) bounds the restarts, SUPERVISE_PAUSE_S (default 1) is waited before each, and after
# SUPERVISE_QUICK (default 10) ends in a row with an error within a minute of the start it is given up: the error lasts.
case "${1-}" in -h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
    ;;
"" | -*)
    echo "supervise.sh: expected a command to start, not '${1-}'; --help says more" >&2
    exit 2
    ;;
esac
set -u
child=
stopping=
quick=0
trap 'stopping=1; signalled=1; [ -n "$child" ] && kill -TERM "$child" 2>/dev/null' TERM INT
for ((restarts = 0; ; restarts++)); do
    started=$SECONDS
    "$@" &
    child=$!
    [ -n "$stopping" ] && kill -TERM "$child" # the signal came before there was anyone to pass it on to
    signalled=1
    while [ -n "$signalled" ]; do # a signal ends the wait; bash still knows the code of a child that has ended
        signalled=
        wait "$child"
        code=$?
    done
    child=
    if [ "$code" -eq 0 ] || [ "$code" -eq 2 ] || [ -n "$stopping" ]; then
        exit "$code"
    fi
    if ((restarts == 0 && (code == 126 || code == 127))); then # later a file system may be away for a moment
        echo "supervise: $1 cannot be started (exit code $code)" >&2
        exit 2
    fi
    if ((code < 128 && SECONDS - started < 60)); then # above, a signal killed it
        ((quick++))
    else
        quick=0
    fi
    if ((restarts >= ${SUPERVISE_MAX:-1000} || quick >= ${SUPERVISE_QUICK:-10})); then
        echo "supervise: exit code $code, given up after $restarts restarts" >&2
        exit 1
    fi
    echo "supervise: exit code $code, starting again: $*" >&2
    sleep "${SUPERVISE_PAUSE_S:-1}"
    [ -n "$stopping" ] && exit "$code"
done
