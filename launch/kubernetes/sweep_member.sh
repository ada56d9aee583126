#!/usr/bin/env bash
# Runs one run of a sweep in a pod, then makes the table of what has finished, so that the last run to
# end leaves the whole one.
#   bash launch/kubernetes/sweep_member.sh <run> python -m launch.sweep --config=... --workdir=...
set -u
run=$1
shift
"$@" --run="$run" &
child=$!
# the first process of a pod is the one that Kubernetes asks to stop
trap 'kill -TERM "$child" 2>/dev/null' TERM
wait "$child"
code=$?
while kill -0 "$child" 2>/dev/null; do
    wait "$child"
    code=$?
done
workdir=
for word in "$@"; do
    case $word in --workdir=*) workdir=${word#--workdir=} ;; esac
done
if [ "$code" -ne 130 ]; then
    flock "$workdir/.table.lock" "$@" --jobs=0 # says which runs have not finished, by exit code 1
fi
exit "$code"
