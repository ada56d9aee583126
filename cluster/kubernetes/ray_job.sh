#!/usr/bin/env bash
# {{ what }}
#
# Starts it on the Ray cluster whose dashboard RAY_API_SERVER_ADDRESS names, as in
# http://127.0.0.1:8265 after kubectl port-forward service/{{ name }}-head-svc 8265. After the loss of
# the head, give the line again.
set -euo pipefail
ray job submit --no-wait -- {{ command | words }}
