#!/usr/bin/env bash
# Runs a role on a node of a Ray cluster, again and again until it ends well.
#   bash launch/kubernetes/ray_role.sh python -m launch.train --role=actor --name=actor-0 --config=... --workdir=...
# POD_IP is the address at which other roles reach this node's devices.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec bash launch/supervise.sh "$@" --host="$POD_IP"
