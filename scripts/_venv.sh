# Makes virtual environments for the other scripts, which source it. For bash 3.2, which macOS has.
ROOT=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd -P)

stack_versions() {  # prints the Pythons that STACK may have, best first; requirements.txt says why
    case $1 in
        today) echo '3.11 3.12 3.13 3.10' ;;
        paper) echo '3.8' ;;
        tx2) echo '3.6' ;;
        *) echo "error: unknown stack '$1'; allowed: today, paper, tx2" >&2; return 2 ;;
    esac
}

venv_name() { if [ "$1" = today ]; then echo .venv; else echo ".venv-$1"; fi; }

# Prints the interpreter that $1 comes from: $1 may be in an environment. Fails unless it runs (a
# pyenv shim may not), is a version in $2, and can make environments.
base_python() {
    "$1" -c 'import ensurepip, os, sys, venv
version = "%d.%d" % sys.version_info[:2]
version in sys.argv[1].split() or sys.exit(1)
base = os.path.join(sys.base_prefix, "bin", "python" + version)
print(base if os.path.exists(base) else sys.executable)' "$2" 2>/dev/null </dev/null
}

find_python() {  # prints an interpreter that can make the environment of STACK, or fails
    local versions version candidate
    versions=$(stack_versions "$1") || return
    for version in $versions python3; do
        while read -r candidate; do
            [ ! -x "$candidate" ] || ! base_python "$candidate" "$versions" || return 0
        done < <(type -aP "python${version#python}"
                 ls -d "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$version".*/bin/python 2>/dev/null)
    done
    return 1
}

venv_is_ready() {  # uses the variables of ensure_venv
    [ ! -e "$venv/making" ] && [[ $(cat "$venv/installed" 2>/dev/null; echo .) == "$wanted"$'\n'* ]] &&
        base_python "$PYTHON" "$versions" >/dev/null
}

# Makes or updates the environment of STACK, with `dev` also what tests need. Sets PYTHON. The file
# `making` exists while pip works; then `installed` says for which place, and what is there.
ensure_venv() {
    local files=("$ROOT/requirements.txt" ${2+"$ROOT/requirements-$2.txt"})
    local versions venv here wanted base options='' pip=pip
    versions=$(stack_versions "$1") || exit
    venv=$ROOT/$(venv_name "$1") PYTHON=$ROOT/$(venv_name "$1")/bin/python
    here="$(readlink -f "$venv") on $(uname -m)"
    wanted=$here$'\n'$(cat "${files[@]}") || exit
    ! venv_is_ready || return 0
    if ! base=$(base_python "$PYTHON" "$versions") && ! base=$(find_python "$1"); then
        echo "error: no Python found for the $1 stack: put ${versions// / or }, with its venv" \
            "module, on the PATH or under pyenv (apt install python${versions%% *}-venv, or pyenv" \
            "install ${versions%% *}); this TensorFlow exists for no other version" >&2; exit 2
    fi
    exec 9>>"$ROOT/.lock${venv##*/}"  # pip inherits it; macOS has no flock command
    [ ! -e "$venv/making" ] || echo "Waiting for the script that makes $venv, if one does ..." >&2
    "$base" -c 'import contextlib, fcntl  # where there are no locks, nothing waits
with contextlib.suppress(OSError): fcntl.flock(9, fcntl.LOCK_EX)' || exit
    ! venv_is_ready || { exec 9>&-; return 0; }
    [ ! -e "$venv/making" ] || rm -rf "$venv"  # was interrupted
    if [ -e "$venv" ] && ! { [ "$(head -n 1 "$venv/installed" || echo "$here")" = "$here" ] &&
            base_python "$PYTHON" "$versions"; } >/dev/null 2>&1; then
        echo "error: $venv was made elsewhere, or by another Python; remove it first" >&2; exit 2
    fi
    [ "$1" != tx2 ] || pip='pip<22'  # later ones need Python 3.7, but an old pip may try them
    [ "$1 $(uname -m)" != 'tx2 aarch64' ] || options=--system-site-packages
    [ -z "$options" ] || "$base" -c 'import tensorflow' || exit 2  # NVIDIA's, which is in no index
    mkdir -p "$venv" && : >"$venv/making" || exit
    echo "Installing in $venv, with $("$base" --version): up to 3 GB, 1 to 10 minutes ..." >&2
    if ! { { "$PYTHON" -m pip --version || "$base" -m venv ${options:+"$options"} "$venv"; } &&
            "$PYTHON" -m pip install --upgrade "$pip" &&
            "$PYTHON" -m pip install "${files[@]/#/-r}"; } >"$venv/install.log" 2>&1; then
        rm -f "$venv/making"  # pip ended in order, so the next call can continue
        { tail -n 25 "$venv/install.log"; echo "error: see $venv/install.log"; } >&2; exit 1
    fi
    echo "$wanted" >"$venv/installed" && sync && rm "$venv/making" || exit
    exec 9>&-
}
