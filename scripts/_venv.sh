# Sourced by the other scripts: makes the virtual environment of a stack and keeps it up to date.
#
#   ensure_venv STACK   makes or updates the environment; sets PYTHON to its interpreter
#   find_python STACK   prints an interpreter that can make one; status 1 if there is none
#   venv_name STACK     prints .venv, .venv-paper or .venv-tx2
#
# ROOT is the repository, whatever the current folder. Written for bash 3.2, which macOS has.

ROOT=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd -P)

stack_versions() {  # best first; requirements.txt says why
    case $1 in
        today) echo '3.11 3.12 3.13 3.10' ;;
        paper) echo '3.8' ;;
        tx2) echo '3.6' ;;
        *) echo "error: unknown stack '$1'; allowed: today, paper, tx2" >&2; return 2 ;;
    esac
}

venv_name() {
    if [ "$1" = today ]; then echo .venv; else echo ".venv-$1"; fi
}

# Prints the interpreter that $1 comes from, as $1 may be in an environment about to be replaced.
# Fails unless it runs (a pyenv shim may not), is a version in $2, and can make environments.
base_python() {
    "$1" -c '
import ensurepip, os, sys, venv
version = "%d.%d" % sys.version_info[:2]
base = os.path.join(sys.base_prefix, "bin", "python" + version)
print(base if os.path.exists(base) else sys.executable)
sys.exit(version not in sys.argv[1].split())' "$2" 2>/dev/null </dev/null
}

find_python() {
    local versions version candidate found
    versions=$(stack_versions "$1") || return
    for version in $versions python3; do
        while read -r candidate; do
            if [ -x "$candidate" ] && found=$(base_python "$candidate" "$versions"); then
                echo "$found"
                return
            fi
        done < <(type -aP "python${version#python}"
                 ls -d "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$version".*/bin/python 2>/dev/null)
    done
    return 1
}

ensure_venv() {
    local stack=$1 versions name venv base making stamp wanted running here made_on
    local size='2 GB, 1 to 10 minutes' pip=pip options=()
    versions=$(stack_versions "$stack") || exit
    name=$(venv_name "$stack")
    [ "$stack" != today ] || size='3 GB, 1 to 10 minutes'
    here=$(uname -m)
    venv=$ROOT/$name
    making=$venv/making        # holds the process id while the environment is being made
    made_on=$venv/machine      # holds the processor; packages run on no other
    stamp=$venv/requirements.cksum  # holds the checksum of what is installed
    PYTHON=$venv/bin/python
    wanted=$(cksum <"$ROOT/requirements.txt") || exit

    drop_unusable_venv
    if [ ! -e "$venv" ]; then
        if ! base=$(find_python "$stack"); then
            echo "error: no Python found for the $stack stack: put ${versions// / or }, with its" \
                 "venv module, on the PATH or under pyenv (apt install python${versions%% *}-venv," \
                 "or pyenv install ${versions%% *}); this TensorFlow exists for no other version" >&2
            exit 2
        fi
        if [ "$stack $here" = 'tx2 aarch64' ]; then  # uses NVIDIA's build, which is in no index
            options=(--system-site-packages)
            has_tensorflow "$base" || exit 2
        fi
        echo "Making $name with $("$base" --version) and installing requirements.txt ($size) ..." >&2
        mkdir "$venv"
        echo $$ >"$making"
        echo "$here" >"$made_on"
        logged "$venv" "$base" -m venv ${options[@]+"${options[@]}"} "$venv"
    elif [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return
    else
        echo "Bringing $name up to date with requirements.txt (seconds, or minutes if much changed) ..." >&2
        rm -f "$stamp"
    fi
    local started=$SECONDS
    [ "$stack" != tx2 ] || pip='pip<22'  # later ones need Python 3.7, but an old pip may try them
    logged "$venv" "$PYTHON" -m pip install --upgrade "$pip"
    logged "$venv" "$PYTHON" -m pip install -r "$ROOT/requirements.txt"
    echo "$wanted" >"$stamp"
    rm -f "$making"
    echo "$name is ready after $((SECONDS - started)) s." >&2
}

# Part of ensure_venv, whose variables it uses. Removes an environment that cannot be used; exits if
# the user has to decide.
drop_unusable_venv() {
    if [ -e "$making" ]; then
        running=$(cat "$making")
        if [ -n "$running" ] && kill -0 "$running" 2>/dev/null; then
            echo "error: $name is being made by process $running: wait for it, or stop it" >&2
            exit 1
        fi
        echo "$name was left unfinished: making it again" >&2
        rm -rf "$venv"
    elif [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ]; then
        echo "error: $venv is not a virtual environment; move it out of the way" >&2
        exit 2
    elif [ -e "$made_on" ] && [ "$(cat "$made_on")" != "$here" ]; then
        echo "$name was made on $(cat "$made_on"), this is $here: making it again" >&2
        rm -rf "$venv"
    elif [ -e "$venv" ] && ! "$PYTHON" -c '' 2>/dev/null; then
        echo "the Python of $name does not run here: making it again" >&2
        rm -rf "$venv"
    elif [ -e "$venv" ] && ! base_python "$PYTHON" "$versions" >/dev/null; then
        echo "error: $name holds $("$PYTHON" --version), but this stack needs ${versions// / or };" \
             "remove $venv and run this again" >&2
        exit 2
    fi
}

has_tensorflow() {  # checks that $1 finds a TensorFlow; if not, says where to get it
    "$1" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("tensorflow") is None)' ||
        { echo "error: $1 has no TensorFlow, and for this board only NVIDIA builds one: install" \
               "that of JetPack 4.6 for this Python, then run this again" >&2; return 2; }
}

logged() {  # runs $2... with its output in a file in $1; shows the end of it on failure
    local log=$1/install.log
    if ! "${@:2}" >"$log" 2>&1; then
        echo "error: this failed: ${*:2}" >&2
        tail -n 25 "$log" >&2
        echo "(the whole output: $log)" >&2
        exit 1
    fi
}
