#!/usr/bin/env bash
# Locks the requirements: writes requirements/locked/*.txt, in which every package that the pins in
# requirements.txt and requirements/*.txt bring along has a version and hashes, and docs/licences.md,
# the licences of what is installed in .venv. Run it after a change of a pin.
#
#   bash launch/lock.sh [--upgrade]
#
# Without --upgrade, packages keep the versions that are locked now where the pins allow it.
case "${1-}" in
-h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
    ;;
"" | --upgrade) ;;
*)
    echo "lock.sh: unknown argument $1; the only one is --upgrade" >&2
    exit 2
    ;;
esac
set -euo pipefail
arguments=("$@")
set --
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/set_up.sh

tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
echo "Installing the tools of requirements/lock.txt" >&2
python -m venv "$tools/venv"
"$tools/venv/bin/python" -m pip install --quiet --disable-pip-version-check -r requirements/lock.txt

# $1: the file to write; the rest: files of requirements and further arguments
compile() {
    "$tools/venv/bin/uv" pip compile --quiet --universal --python-version 3.12 --generate-hashes \
        --no-annotate --custom-compile-command "bash launch/lock.sh" -o "$1" "${@:2}"
}

# One version of each package for all that may be installed together, whatever is chosen of it.
# Programs with an environment of their own are locked apart.
apart=" peers lock vllm "
together=(requirements.txt)
for file in requirements/*.txt; do
    if [[ $apart != *" $(basename "$file" .txt) "* ]]; then
        together+=("$file")
    fi
done
mkdir -p requirements/locked
# Lines with a version, without their hashes.
versions() {
    grep -hE '^[A-Za-z0-9]' "$@" | sed 's/ *\\$//' | sort -u
}
# uv keeps the versions of the file that it writes
for file in "${together[@]}"; do
    versions "requirements/locked/$(basename "$file")" 2>/dev/null || true
done | sort -u >"$tools/together.txt"
echo "Locking ${together[*]}" >&2
compile "$tools/together.txt" "${arguments[@]}" "${together[@]}"
versions "$tools/together.txt" >"$tools/constraints.txt"
for file in "${together[@]}"; do
    compile "requirements/locked/$(basename "$file")" --upgrade -c "$tools/constraints.txt" "$file"
done
for name in $apart; do
    echo "Locking requirements/$name.txt" >&2
    compile "requirements/locked/$name.txt" "${arguments[@]}" "requirements/$name.txt"
done

echo "Writing docs/licences.md" >&2
{
    echo "# Licences of the dependencies"
    echo
    echo "Packages in an environment with everything that \`launch/test.sh\` installs, as they state"
    echo "their licences. Written by \`bash launch/lock.sh\`."
    echo
    "$tools/venv/bin/pip-licenses" --python=.venv/bin/python --from=mixed --format=markdown \
        --with-urls --order=name
} >"$tools/licences.md"
mv "$tools/licences.md" docs/licences.md
