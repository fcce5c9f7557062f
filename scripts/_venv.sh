# Sourced by the other scripts: the virtual environment of a stack, made once and kept up to date.
#
#   ensure_venv today|paper   makes or updates .venv or .venv-paper; sets PYTHON to its interpreter
#   find_python today|paper   prints an interpreter that can make it; status 1 if there is none
#
# ROOT is the repository, wherever the script was called from. Written for bash 3.2, macOS's own.

ROOT=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd -P)

stack_versions() {  # best first: requirements.txt says why
    case $1 in
        today) echo '3.11 3.12 3.13 3.10' ;;
        paper) echo '3.8' ;;
        *) echo "error: unknown stack '$1'; allowed: today, paper" >&2; return 2 ;;
    esac
}

# Prints the interpreter behind $1, never that of an environment, which may be about to be replaced.
# Fails unless it runs (a pyenv shim may not), is one of the versions in $2 and can make environments.
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
    local stack=$1 versions name venv base size making stamp wanted running
    versions=$(stack_versions "$stack") || exit
    case $stack in
        today) name=.venv; size='3 GB, 1 to 10 minutes' ;;
        paper) name=.venv-paper; size='2 GB, 1 to 10 minutes' ;;
    esac
    venv=$ROOT/$name
    making=$venv/making        # holds the process id; there from the first moment to the last
    stamp=$venv/requirements.cksum  # what is installed
    PYTHON=$venv/bin/python
    wanted=$(cksum <"$ROOT/requirements.txt") || exit

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
    elif [ -e "$venv" ] && ! "$PYTHON" -c '' 2>/dev/null; then
        echo "the Python of $name no longer runs: making it again" >&2
        rm -rf "$venv"
    elif [ -e "$venv" ] && ! base_python "$PYTHON" "$versions" >/dev/null; then
        echo "error: $name holds $("$PYTHON" --version), but this stack needs ${versions// / or };" \
             "remove $venv and run this again" >&2
        exit 2
    fi

    if [ ! -e "$venv" ]; then
        if ! base=$(find_python "$stack"); then
            cat >&2 <<END
error: no Python found for the $stack stack. Any of these would do: ${versions// /, }
       with its venv module (Debian, Ubuntu: apt install python${versions%% *}-venv),
       on the PATH or as a pyenv version (pyenv install ${versions%% *}).
END
            exit 2
        fi
        echo "Making $name with $("$base" --version) and installing requirements.txt ($size) ..." >&2
        mkdir "$venv"
        echo $$ >"$making"
        logged "$venv" "$base" -m venv "$venv"
    elif [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return
    else
        echo "Bringing $name up to date with requirements.txt (seconds, or minutes if much changed) ..." >&2
        rm -f "$stamp"
    fi
    local started=$SECONDS
    logged "$venv" "$PYTHON" -m pip install --upgrade pip
    logged "$venv" "$PYTHON" -m pip install -r "$ROOT/requirements.txt"
    echo "$wanted" >"$stamp"
    rm -f "$making"
    echo "$name is ready after $((SECONDS - started)) s." >&2
}

logged() {  # runs $2... with its output in a file under $1, shown only if it fails
    local log=$1/install.log
    if ! "${@:2}" >"$log" 2>&1; then
        echo "error: this failed: ${*:2}" >&2
        tail -n 25 "$log" >&2
        echo "(all of it: $log)" >&2
        exit 1
    fi
}
