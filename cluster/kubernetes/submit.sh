#!/usr/bin/env bash
# Hands over what was rendered beside it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
kubectl apply --filename={{ manifest }}
