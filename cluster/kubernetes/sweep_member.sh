#!/usr/bin/env bash
# Runs one run of a sweep in a pod, then makes the table of what has finished, so that the last run to
# end leaves the whole one.
#   bash cluster/kubernetes/sweep_member.sh <run> python -m launch.sweep --config=... --workdir=...
set -u
run=$1
shift
"$@" --run="$run" &
child=$!
# The first process of a pod is the one that Kubernetes asks to stop. A signal ends the wait but not
# the run; bash still knows the code of a run that has ended.
trap 'signalled=1; kill -TERM "$child" 2>/dev/null' TERM
signalled=1
while [ -n "$signalled" ]; do
    signalled=
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
