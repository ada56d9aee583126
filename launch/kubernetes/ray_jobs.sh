#!/usr/bin/env bash
# {{ what }}
#
# Starts the roles on the Ray cluster whose dashboard RAY_API_SERVER_ADDRESS names, as in
# http://127.0.0.1:8265 after kubectl port-forward service/{{ name }}-head-svc 8265. A role that ends
# with an error is started again where it runs; after the loss of its node, give its line again.
set -euo pipefail
{% for role, command in commands %}
ray job submit --no-wait --entrypoint-resources='{"{{ role }}": 1}' -- {{ command | words }}
{% endfor %}
