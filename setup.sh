#!/usr/bin/env bash
# Sets up a checkout: shared folders, the Python environment, the installation. Running it again changes nothing.
#
#   ./setup.sh
#   PACELINE_HOME=/shared/paceline PYTHON=python3.12 ./setup.sh
#
# PACELINE_HOME is the folder of data sets and models, which several people or nodes can share (default: ./shared_data).
# Several nodes may run this at once on a shared file system: one installs, the others wait for it.
set -euo pipefail

called_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")"
home=${PACELINE_HOME:-$PWD/shared_data}
[[ $home == /* ]] || home=$called_from/$home
python=${PYTHON:-python3}
lock=.setup.lock # a folder, because creating one is atomic on every file system
changed=no

fail() {
    echo "setup: $*" >&2
    exit 1
}

make_folders() {
    local folder
    for folder in datasets models; do
        [[ -d $home/$folder ]] && continue
        mkdir -p "$home/$folder" || fail "$home/$folder cannot be created; set PACELINE_HOME to a folder that you can write to"
        echo "created $home/$folder"
        changed=yes
    done
}

check_tools() {
    command -v make >/dev/null || fail "make is not installed; install it with your system's packages"
    "$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
        fail "$python is not Python 3.10 or newer with venv; install it, or name another one: PYTHON=python3.12 ./setup.sh"
}

# The process that holds the lock has written its host and process id into it.
take_lock() {
    local is_reported=no host process
    until mkdir "$lock" 2>/dev/null; do
        [[ -d $lock || -w . ]] || fail "$PWD cannot be written to"
        read -r host process 2>/dev/null <"$lock/owner" || { sleep 0.2; continue; } # just created or just removed
        if [[ $host == "$(hostname)" ]] && ! kill -0 "$process" 2>/dev/null; then
            [[ "$(cat "$lock/owner" 2>/dev/null)" == "$host $process" ]] || continue # it has just finished
            fail "process $process ended without removing $PWD/$lock; remove that folder and run this again"
        fi
        [[ $is_reported == yes ]] || echo "waiting for process $process on $host, which is installing ($PWD/$lock)"
        is_reported=yes
        sleep 0.2
    done
    trap 'rm -rf "$lock"' EXIT
    trap 'exit 130' INT TERM
    echo "$(hostname) $$" >"$lock/owner"
}

is_installed() { make --question .venv/.installed >/dev/null 2>&1; }

install() {
    is_installed && return
    check_tools
    take_lock
    is_installed && return # another process has installed while this one waited
    echo "installing into $PWD/.venv; this takes a few minutes"
    make --silent setup PYTHON="$python" || fail "the installation failed, see above; run this again to continue"
    changed=yes
}

make_folders
install
if [[ $changed == no ]]; then
    echo "Everything is already set up; nothing was changed."
else
    echo "Everything is set up."
fi
echo "Next:"
echo "  . $PWD/.venv/bin/activate"
echo "  export PACELINE_HOME=$home"
echo "  paceline data get mnist"
echo "  paceline train mnist --procs 2"
