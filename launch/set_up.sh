# Sourced by the other scripts: goes to the repository, makes .venv with the pinned requirements
# once, activates it, and sets what makes CPU runs fast unless the caller has set it.
#
# REQUIREMENTS: the files of requirements to install; requirements.txt unless the caller sets it.
# Installed is what launch/lock.sh made of them: every package in one version, with hashes.
# Scripts run from the repository's folder, so the project itself need not be installed.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null
}

find_python() {
    local candidate
    # names on the path first (pyenv follows .python-version), then what pyenv and uv have installed
    for candidate in ${PYTHON:+"$PYTHON"} python3.12 python3 python python3.13 python3.14 \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python "$(uv python find '>=3.12' 2>/dev/null || true)"; do
        if [ -n "$candidate" ] && is_new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "This needs Python 3.12 or newer; found $(python3 --version 2>/dev/null || echo 'no python3')." >&2
    echo "Install one (apt install python3.12 python3.12-venv, pyenv install 3.12, uv python install 3.12)" >&2
    echo "or name it: PYTHON=/path/to/python3.12 bash $0" >&2
    return 1
}

install_requirements() {
    local python log file count=0 line started=$SECONDS
    local files=()
    for file in $REQUIREMENTS; do
        is_locked "$file" || return 1
        files+=(-r "$(locked "$file")")
    done
    python=$(find_python) || return 1
    if ! is_new_enough .venv/bin/python && ! "$python" -m venv --clear .venv; then
        echo "$python cannot make virtual environments; on Debian and Ubuntu: apt install python3.12-venv" >&2
        return 1
    fi
    log=.venv/install.log
    : >"$log"
    printf 'Installing %s into .venv, once; this takes a minute or more' "$REQUIREMENTS" >&2
    if [ ! -t 2 ]; then # a log gets whole lines
        echo >&2
    fi
    while read -r line; do
        echo "$line" >>"$log"
        if [[ $line = Collecting* ]]; then
            count=$((count + 1))
            if [ -t 2 ]; then
                printf '\r\033[KInstalling %s into .venv, once: %d packages' "$REQUIREMENTS" "$count" >&2
            elif [ $((count % 20)) -eq 0 ]; then
                echo "  $count packages found after $((SECONDS - started)) s" >&2
            fi
        fi
    done < <(.venv/bin/python -m pip install --disable-pip-version-check --require-hashes "${files[@]}" 2>&1 || echo FAILED)
    echo "  $count packages, installed after $((SECONDS - started)) s" >&2
    if [ "$(tail -n 1 "$log")" = FAILED ]; then
        tail -n 15 "$log" >&2
        echo "Could not install $REQUIREMENTS; everything pip said is in $log." >&2
        return 1
    fi
    remember
}

locked() {
    echo "requirements/locked/${1##*/}"
}

is_locked() {
    local pin pattern
    while read -r pin; do
        pattern=${pin//./\\.}
        pattern=${pattern/%\\.\*/\\.[0-9.]+} # a pin like 0.48.*
        if ! grep -qiE "^$pattern( |\$)" "$(locked "$1")" 2>/dev/null; then
            echo "$1 pins $pin and $(locked "$1") does not; run bash launch/lock.sh" >&2
            return 1
        fi
    done < <(grep -E '^[A-Za-z0-9]' "$1" | sed -E 's/\[[^]]*\]//; s/_/-/g')
}

# What decides which packages are installed: the pins, and the versions that are locked.
deciding() {
    local file
    echo .python-version
    for file in $REQUIREMENTS; do
        echo "$file" "$(locked "$file")"
    done
}

# A file is installed when its checksum stands in .venv/stamp.
is_installed() {
    local file
    for file in $(deciding); do
        grep -qxF "$(cksum "$file")" .venv/stamp 2>/dev/null || return 1
    done
}

# Keeps the lines of files that were installed before with the same pins, so that the scripts do
# not install again and again in turn.
remember() {
    local file now
    now=" $(echo $(deciding)) "
    for file in .python-version requirements.txt requirements/*.txt requirements/locked/*.txt; do
        if [[ $now = *" $file "* ]] ||
            grep -qxF "$(cksum "$file")" .venv/stamp 2>/dev/null; then
            cksum "$file"
        fi
    done >.venv/stamp.new
    mv .venv/stamp.new .venv/stamp
}

REQUIREMENTS=${REQUIREMENTS:-requirements.txt}
if ! is_installed; then
    install_requirements || return 1
fi
export PATH="$PWD/.venv/bin:$PATH"

# ACCELERATORS: files of which one is there where a GPU or a TPU is.
has_accelerator() {
    local file
    for file in ${ACCELERATORS:-/dev/nvidiactl /dev/accel* /dev/vfio/[0-9]*}; do
        if [ -e "$file" ]; then
            return 0
        fi
    done
    return 1
}

# Keep large temporaries, in one arena, instead of faulting them in again every step. Arrays of an
# accelerator are not in this memory, and the threads that compile for it would wait for each other
# in one arena.
if [ -z "${GLIBC_TUNABLES+set}" ] && ! has_accelerator; then
    tunables=glibc.malloc.arena_max=1:glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=8589934592
    export GLIBC_TUNABLES=$tunables:glibc.malloc.trim_threshold=8589934592:glibc.malloc.top_pad=268435456
fi
# XLA uses one core for a small model; two virtual devices with data parallelism use two
if [ -z "${XLA_FLAGS+set}" ]; then
    export XLA_FLAGS=--xla_force_host_platform_device_count=2
fi
