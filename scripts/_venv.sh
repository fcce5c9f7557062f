# Sourced by the other scripts: makes the virtual environment of a stack and keeps it up to date.
#
#   ensure_venv STACK [dev]   makes or updates the environment, with dev also what tests need; sets
#                             PYTHON to its interpreter
#   find_python STACK         prints an interpreter that can make one; status 1 if there is none
#   venv_name STACK           prints .venv, .venv-paper or .venv-tx2
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
    local stack=$1 versions name venv base making stamp wanted here made_on
    local files=("$ROOT/requirements.txt" ${2+"$ROOT/requirements-$2.txt"})
    local what=requirements${2+-$2}
    local size='2 GB, 1 to 10 minutes' pip=pip options=()
    versions=$(stack_versions "$stack") || exit
    name=$(venv_name "$stack")
    [ "$stack" != today ] || size='3 GB, 1 to 10 minutes'
    here=$(uname -m)
    venv=$ROOT/$name
    making=$venv/making        # exists until all is on the disk: "new", or the boot_id of an update
    made_on=$venv/machine      # holds the processor; packages run on no other
    stamp=$venv/$what.cksum    # holds the checksum of what is installed
    PYTHON=$venv/bin/python
    wanted=$(cat "${files[@]}" | cksum) || exit

    ! venv_is_ready || return 0
    if ! base=$(base_python "$PYTHON" "$versions") && ! base=$(find_python "$stack"); then
        echo "error: no Python found for the $stack stack: put ${versions// / or }, with its" \
             "venv module, on the PATH or under pyenv (apt install python${versions%% *}-venv," \
             "or pyenv install ${versions%% *}); this TensorFlow exists for no other version" >&2
        exit 2
    fi
    lock_venv
    if venv_is_ready; then  # another script made it in the meantime
        exec 9>&-
        return
    fi
    drop_unusable_venv
    if [ ! -e "$venv" ]; then
        if [ "$stack $here" = 'tx2 aarch64' ]; then  # uses NVIDIA's build, which is in no index
            options=(--system-site-packages)
            has_tensorflow "$base" || exit 2
        fi
        echo "Making $name with $("$base" --version) and installing $what.txt ($size) ..." >&2
        mkdir "$venv"
        echo new >"$making"
        echo "$here" >"$made_on"
        logged "$base" -m venv ${options[@]+"${options[@]}"} "$venv"
    else
        echo "Bringing $name up to date with $what.txt (seconds, or minutes if much changed) ..." >&2
        boot_id >"$making"
        rm -f "$stamp"
    fi
    local started=$SECONDS
    [ "$stack" != tx2 ] || pip='pip<22'  # later ones need Python 3.7, but an old pip may try them
    logged "$PYTHON" -m pip install --upgrade "$pip"
    logged "$PYTHON" -m pip install "${files[@]/#/-r}"
    echo "$wanted" >"$stamp.part"
    logged sync -f "$venv"  # before the stamp says that all of it is there
    mv "$stamp.part" "$stamp"
    [ $# = 1 ] || cksum <"${files[0]}" >"$venv/requirements.cksum"
    rm -f "$making"
    exec 9>&-
    echo "$name is ready after $((SECONDS - started)) s." >&2
}

# The functions below are parts of ensure_venv, whose variables they use.

venv_is_ready() {
    [ ! -e "$making" ] && [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && made_here &&
        base_python "$PYTHON" "$versions" >/dev/null
}

made_here() { [ ! -e "$made_on" ] || [ "$(cat "$made_on")" = "$here" ]; }

# Waits until no other script makes or updates the environment. The lock is on descriptor 9, which
# pip gets, too: the lock ends with the last of these processes, even after kill -9 or a power cut.
# macOS has no flock command, so Python takes the lock.
lock_venv() {
    local lock=$ROOT/.lock$name
    exec 9>>"$lock"
    "$base" -c '
import fcntl, signal, sys, time
lock, name, started = sys.argv[1], sys.argv[2], time.time()
signal.signal(signal.SIGINT, signal.SIG_DFL)
try:
    try:
        fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.stderr.write("Waiting for process {}, which makes or updates {} (1 to 10 minutes) ...\n"
                         .format(open(lock).read().strip(), name))
        sys.stderr.flush()  # before Python 3.9, a pipe would get the line only at the end
        fcntl.flock(9, fcntl.LOCK_EX)
        sys.stderr.write("waited {:.0f} s for {}\n".format(time.time() - started, name))
except OSError as error:
    sys.stderr.write("warning: {} cannot be locked here ({}): start no second script until it is "
                     "ready\n".format(name, error.strerror))
' "$lock" "$name"
    echo $$ >"$lock"
}

# Removes an environment that cannot be used; exits if the user has to decide.
drop_unusable_venv() {
    rmdir "$venv" 2>/dev/null || true  # empty, of a script that was killed here
    if [ -e "$making" ] && [ "$(cat "$making")" != "$(boot_id)" ]; then
        echo "$name was left unfinished: making it again" >&2
        rm -rf "$venv"
    elif [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ]; then
        echo "error: $venv is not a virtual environment; move it out of the way" >&2
        exit 2
    elif ! made_here; then
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

# Prints an identifier of the time since the machine started. Within it, pip can resume an update that
# was stopped; after a power cut, what pip counts as installed may not be on the disk.
boot_id() {
    cat /proc/sys/kernel/random/boot_id 2>/dev/null || sysctl -n kern.bootsessionuuid 2>/dev/null || true
}

has_tensorflow() {  # checks that $1 finds a TensorFlow; if not, says where to get it
    "$1" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("tensorflow") is None)' ||
        { echo "error: $1 has no TensorFlow, and for this board only NVIDIA builds one: install" \
               "that of JetPack 4.6 for this Python, then run this again" >&2; return 2; }
}

logged() {  # runs a command with its output in a file; shows the end of it on failure
    local log=$venv/install.log
    if ! "$@" >"$log" 2>&1; then
        echo "error: this failed: $*" >&2
        tail -n 25 "$log" >&2
        echo "(the whole output: $log)" >&2
        # A failed update keeps what was there, which may be all that a board without a network has.
        [ "$(cat "$making")" = new ] || { sync -f "$venv" && rm -f "$making"; }
        exit 1
    fi
}
