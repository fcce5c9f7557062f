#!/usr/bin/env bash
# Tries the commands of docs/raspberry_pi.md without a board: makes a system of Debian 12 for 64-bit
# Arm, on which Raspberry Pi OS is based, and runs them there on an emulated Cortex-A72. This shows
# that everything runs; times under emulation mean nothing.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../../scripts/_venv.sh"

SYSTEM_GB=8  # the system, the environment and pip's cache
HOST_PACKAGES='mmdebstrap arch-test qemu-user-static binfmt-support'
BOARD_PACKAGES=python3,ca-certificates,procps  # on the card from the start; COMMANDS install the rest
BOARD_HOME=/home/pi
REPOSITORY=$BOARD_HOME/elastictrainer
BOARD_PATH=/usr/sbin:/usr/bin:/sbin:/bin

# The commands, run in the repository on the board. Those with sudo run as root, others as user pi.
TINY='--model_name mobilenetv2 --alpha 0.35 --input_size 32 --batch_size 8 --dataset_name digits'
RUN="python main.py $TINY --weights none --steps_per_epoch 5 --validation_steps 5 --rho 0.6"
COMMANDS=(
    "sudo apt-get update"
    "sudo apt-get install -y git python3-venv tmux"
    "scripts/install.sh"
    "grep -E 'Building wheel for .* finished|Successfully installed' .venv/install.log"
    "scripts/check_device.sh"
    "scripts/run_tests.sh"
    "python profiler.py $TINY --num_classes 10 --bn_statistics train"
    "$RUN --interval 1 --num_epochs 2"
    # Cuts the power after the first checkpoint; then repeats the same command.
    "$RUN --interval 1 --num_epochs 6 --run_name cut --checkpoint_minutes 0.05 &
     until [ -e logs/cut/resume/last ]; do sleep 1; kill -0 \$!; done
     kill -KILL \$!; wait \$! || [ \$? = 137 ]"
    "$RUN --interval 1 --num_epochs 6 --run_name cut --checkpoint_minutes 0.05 | tee cut.log
     grep 'resumes in epoch' cut.log"
    "$RUN --interval 4 --num_epochs 4 --train_images 40 --bn_statistics frozen --prefix_cache on \\
         --cache_dir . --run_name cached --restart"
    "python plot.py table cut cached"
    "python plot.py curves cut cached --output figures/emulated"
    "python -m elastic.runs.metered"
    # The smallest of the figures.
    "scripts/run_figure15ad_ego.sh --rehearse"
    "python -m tensorboard.main --logdir logs --port 6006 >tensorboard.log 2>&1 &
     until grep -q 'http://' tensorboard.log; do sleep 1; kill -0 \$!; done
     python -c 'import urllib.request as r; print(r.urlopen(\"http://localhost:6006/data/runs\").read())'
     kill \$!"
)

usage() {
    cat <<END
usage: emulate_pi.sh [--cache DIR] [--only N,M,... | --shell | --list]

Makes an emulated Raspberry Pi and runs ${#COMMANDS[@]} commands in it, from the set-up to a rehearsed
figure, on a copy of this repository: about two hours on two cores. Ends with a table of the seconds
and the outcome of each command; the status is 1 if one failed.
  --cache DIR    folder of the system and the log (default: $cache)
  --only N,M     run only these commands, by number, on the system as it is
  --shell        open a shell on the board
  --list         list the commands with their numbers
Needs root (for chroot), $SYSTEM_GB GB of disk, a network, and the Debian packages
$HOST_PACKAGES. Installs nothing on this machine and leaves no
mount and no process. The board has its own processes and mounts, but this machine's network, and root
is root: run nothing there that you do not trust.
The cache stays until you remove it: rm -r --one-file-system DIR.
END
}

fail() { echo "error: $*" >&2; exit 2; }

cache=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/elastictrainer-arm64
only='' shell=''
given=("$@")
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit ;;
        --list) for i in "${!COMMANDS[@]}"; do printf '%2d  %s\n' $((i + 1)) "${COMMANDS[i]}"; done; exit ;;
        --cache | --only) [ -n "${2-}" ] || fail "$1 needs a value; see --help"
                          if [ "$1" = --cache ]; then cache=$2; else only=$2; fi; shift ;;
        --cache=*) cache=${1#--cache=} ;;
        --only=*) only=${1#--only=} ;;
        --shell) shell=1 ;;
        *) fail "unknown argument '$1'; see --help" ;;
    esac
    shift
done
for number in ${only//,/ }; do
    [[ $number =~ ^[1-9][0-9]*$ && $number -le ${#COMMANDS[@]} ]] ||
        fail "--only takes numbers from 1 to ${#COMMANDS[@]}, as in --only 5,6; got '$only'"
done
[ "$(uname -s)" = Linux ] || fail "a system is emulated on Linux alone"
[ "$(id -u)" = 0 ] || fail "needs root, to enter the system: sudo$(printf ' %q' "$0" ${given[@]+"${given[@]}"})"
for tool in mmdebstrap arch-test qemu-aarch64-static update-binfmts unshare chroot; do
    command -v "$tool" >/dev/null ||
        fail "$tool is missing; on Debian and Ubuntu: apt install $HOST_PACKAGES util-linux"
done

# The mounts below exist only for this process and its children, and disappear with them.
if [ "${EMULATE_PI:-}" != $$ ]; then
    unshare --mount --pid --fork true 2>/dev/null ||
        fail "own mounts and processes are not allowed here: start the container with --privileged, or" \
             "use no container"
    EMULATE_PI=$$ exec unshare --mount --propagation private "$0" ${given[@]+"${given[@]}"}
fi

cache=$(readlink -m "$cache")
log=$cache/emulated_pi.log
case $cache/ in "$ROOT"/*) fail "--cache $cache: give a folder outside the repository" ;; esac
(umask 077 && mkdir -p "$cache")  # other users of this machine must not reach the board's files
[ -O "$cache" ] || fail "--cache $cache belongs to another user; give a new folder"
[ -e "$log" ] || [ -z "$(ls -A "$cache")" ] ||  # runs remove files in it
    fail "--cache $cache has other files in it; give a new folder"
touch "$log"
system=$cache/system
results=$cache/results

# ---------------------------------------------------------------- the system

# The kernel runs programs for Arm with qemu. The flag F makes it open qemu now, as the emulated
# system has none.
register_qemu() {
    local entry=/proc/sys/fs/binfmt_misc/qemu-aarch64
    [ -e /proc/sys/fs/binfmt_misc/register ] ||
        mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc ||
        fail "binfmt_misc cannot be mounted: the kernel has none, or this is a container without it"
    [ -e $entry ] || update-binfmts --enable qemu-aarch64 || true
    [ -e $entry ] || fail "qemu-aarch64 could not be registered: update-binfmts --enable qemu-aarch64"
    grep -q '^flags:.*F' $entry ||
        fail "qemu-aarch64 is registered without the flag F; use Debian's qemu-user-static"
}

make_system() {
    local free
    free=$(df -Pk "$cache" | awk 'END { print int($4 / 1e6) }')
    [ "$free" -ge $SYSTEM_GB ] ||
        fail "$cache has $free GB free, $SYSTEM_GB are needed; give another folder with --cache"
    echo "Making the system in $system (5 minutes) ..." >&2
    rm -rf --one-file-system "$system.making"
    mmdebstrap --quiet --variant=minbase --architectures=arm64 --include="$BOARD_PACKAGES" bookworm \
        "$system.making" || fail "mmdebstrap failed; its message is above"
    chroot "$system.making" useradd --create-home --shell /bin/bash pi
    mv "$system.making" "$system"
}

# Runs a command as root in the system, with its own processes: none of this machine can be seen, and
# those that the command leaves end with it. Links in the system lead to places in the system.
enter() {
    unshare --mount --pid --fork --kill-child chroot "$system" /usr/bin/env -i PATH="$BOARD_PATH" /bin/sh -ec '
        mount -t proc proc /proc
        mount -t tmpfs -o mode=1777 tmpfs /dev/shm
        mount -t devpts -o ptmxmode=666 devpts /dev/pts
        "$@"
        exit 0  # without this line the command would be process 1, which ignores signals
    ' sh "$@"
}

put() {  # writes its input to a file of the system
    enter sh -c 'rm -rf "$1" && cat >"$1"' sh "$1"
}

# Copies what pip and TLS need on this network. Paths of this machine do not exist on the board.
pass_on_network() {
    local certificates=/etc/ssl/certs/ca-certificates.crt
    echo '127.0.0.1 localhost raspberrypi' | put /etc/hosts
    put /etc/resolv.conf </etc/resolv.conf
    [ ! -e $certificates ] || put $certificates <$certificates
    {
        echo '[global]'
        echo "cert = $certificates"
        python3 -m pip config list 2>/dev/null | sed -n \
            "s/^[^.]*\.\(index-url\|extra-index-url\|trusted-host\|proxy\|default-timeout\)='\(.*\)'\$/\1 = \2/p" |
            sed 's/\\n/ /g; s/\bfile:[^ ]*//g; s/^default-timeout/timeout/; /= *$/d'
    } | put /etc/pip.conf
}

copy_repository() {  # tracked and new files, without the output of runs and tests
    local kept=()
    [ -z "$only$shell" ] || kept=(! -name '.venv*' ! -name logs ! -name figures ! -name '*.log')
    enter sh -c 'cd "$1" && { [ ! -L "$2" ] || rm "$2"; } && mkdir -p "$2" && chown pi:pi "$2"' sh \
        "$BOARD_HOME" "$REPOSITORY"
    on_board pi find . -mindepth 1 -maxdepth 1 ${kept[@]+"${kept[@]}"} -exec rm -rf {} +
    git -C "$ROOT" ls-files -co --exclude-standard -z |
        (cd "$ROOT" && while IFS= read -r -d '' file; do [ ! -e "$file" ] || printf '%s\0' "$file"; done |
            tar --null --files-from - --create) | on_board pi tar --extract --no-same-owner
}

# ---------------------------------------------------------------- the commands

on_board() {  # on_board USER COMMAND...: runs the command as if the environment were activated
    local proxies
    mapfile -t proxies < <(env | grep -iE '^(https?|no)_proxy=')
    enter chroot --userspec="$1:$1" / /usr/bin/env -i -C "$REPOSITORY" HOME="$BOARD_HOME" USER="$1" \
        LANG=C.UTF-8 TERM="${TERM:-dumb}" PATH="$REPOSITORY/.venv/bin:$BOARD_PATH" \
        QEMU_CPU=cortex-a72 DEBIAN_FRONTEND=noninteractive PYTHONUNBUFFERED=1 \
        ${proxies[@]+"${proxies[@]}"} "${@:2}"
}

run_command() {  # runs the command with this number; writes to the log and to its own file
    local number=$1 command=${COMMANDS[$1 - 1]} user=pi begin=$SECONDS status=0
    case $command in 'sudo '*) user=root ;; esac
    printf '\n== %d of %d, %s: %s\n' "$number" ${#COMMANDS[@]} "$(date +%T)" "$command" | tee -a "$log"
    # Its own process group lets us end whatever it started.
    set -m
    on_board "$user" bash -euo pipefail -c "${command#sudo }" </dev/null > >(tee -a "$log") 2>&1 &
    running=$!
    set +m
    wait "$running" || status=$?
    kill -KILL -- "-$running" 2>/dev/null || true
    running=
    [ "$status" = 0 ] && outcome=ok || outcome="status $status"
    printf -- '-- %d s, %s\n' $((SECONDS - begin)) "$outcome" | tee -a "$log"
    printf '%2d  %6d  %-10s  %s\n' "$number" $((SECONDS - begin)) "$outcome" \
        "${command%%$'\n'*}" >"$results/$number"
}

stopped() {
    trap - INT TERM HUP
    [ -z "${running:-}" ] || kill -KILL -- "-$running" 2>/dev/null || true
    echo "stopped; a later run repeats single commands with --only" >&2
    exit "$1"
}

register_qemu
[ -e "$system" ] || make_system
pass_on_network
copy_repository
if [ -n "$shell" ]; then
    on_board pi bash -i
    exit
fi
trap 'stopped 130' INT
trap 'stopped 143' TERM
trap 'stopped 129' HUP
mkdir -p "$results"
if [ -z "$only" ]; then
    rm -f "$results"/*
    : >"$log"
    only=$(seq -s , ${#COMMANDS[@]})
fi
for number in ${only//,/ }; do
    run_command "$number"
done
{
    printf '\n%2s  %6s  %-10s  %s\n' '' s outcome command
    (cd "$results" && printf '%s\n' * | sort -n | xargs cat)
} | tee -a "$log"
echo "the whole output: $log"
! grep -qv '  ok  ' "$results"/*
