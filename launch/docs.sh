#!/usr/bin/env bash
# Builds README.md and docs/ as a site: open site/index.html. Neither this nor reading it needs a
# network, once requirements/docs.txt is installed.
#
#   bash launch/docs.sh [folder]
#
# folder: site, unless named.
case "${1-}" in -h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
    ;;
-*)
    echo "docs.sh: unknown option $1; the only argument is a folder" >&2
    exit 2
    ;;
esac
if (($# > 1)); then
    echo "docs.sh: unexpected argument $2; the only one is a folder" >&2
    exit 2
fi
set -euo pipefail
folder=$(realpath -m "${1:-"$(dirname "${BASH_SOURCE[0]}")/../site"}")
REQUIREMENTS="requirements.txt requirements/docs.txt"
set --
source "$(dirname "${BASH_SOURCE[0]}")/set_up.sh"
exec python -m sphinx --quiet --fail-on-warning --keep-going -c docs . "$folder"
