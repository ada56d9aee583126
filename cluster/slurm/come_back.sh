# Whether a job comes back when its command has ended is decided here:
#   0, 2               it does not: the run is complete, or would fail again
#   130, 143           the processes were asked to stop, as before the time limit, and it comes back
#   any other code     it comes back, {{ retries }} times at most
# If this script was asked to stop too, SLURM has decided: scancel ends the job, and pre-emption and
# scontrol requeue have put it back already.
told=
signalled=
trap 'told=1 signalled=1' TERM
failures={{ logs | sh }}/$SLURM_JOB_ID.failures

# Waits for a child. A signal ends bash's wait, which is then repeated: bash still knows the code of a
# child that has ended meanwhile.
await() {
    local code
    signalled=1
    while [ -n "$signalled" ]; do
        signalled=
        wait "$1"
        code=$?
    done
    return "$code"
}

finish() {
    local code=$1
    echo "cluster: exit code $code${told:+, asked to stop}, job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}"
    case $code in
    0 | 2) exit "$code" ;;
    esac
    [ -n "$told" ] && exit "$code"
    if [ "$code" -ne 130 ] && [ "$code" -ne 143 ]; then
        echo "$code" >>"$failures"
        if [ "$(wc -l <"$failures")" -gt {{ retries }} ]; then
            echo "cluster: given up"
            exit "$code"
        fi
    fi
    scontrol requeue "$SLURM_JOB_ID"
    exit "$code"
}
