#!/usr/bin/env bash
# Runs launch.on_ray on the head of a Ray cluster, again and again until it ends well.
#   bash cluster/kubernetes/ray_run.sh python -m launch.on_ray --address=auto --config=... --workdir=...
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec bash launch/supervise.sh "$@"
