#!/usr/bin/env bash
# Trains a small coding agent from scratch on this machine's CPU and writes a report.
#
#   bash launch/quickstart.sh [workdir] [flags of launch.train, as in --config.seed=1]
#
# A run that was stopped continues from its workdir (runs/quickstart unless given).
case "${1-}" in -h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
    ;;
esac
set -euo pipefail
here=$PWD
source "$(dirname "${BASH_SOURCE[0]}")/set_up.sh"

workdir=runs/quickstart
if [ $# -gt 0 ] && [[ $1 != -* ]]; then
    workdir=$(cd "$here" && realpath -m "$1")
    shift
fi
exec python -m launch.train --config=configs/quickstart.py --workdir="$workdir" "$@"
