#!/usr/bin/env bash
# Submits what was rendered beside it; prints the job's number.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
mkdir -p {{ logs | sh }}
{% if role == "sweep" %}
array=$(sbatch --parsable sweep.sh)
echo "$array"
sbatch --parsable --dependency="afterany:${array%%;*}" sweep_table.sh
{% else %}
sbatch --parsable {{ script }}
{% endif %}
