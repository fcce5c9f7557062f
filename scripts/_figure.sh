#!/usr/bin/env bash
# Trains the missing runs of a figure and draws it. run_figure*.sh are links to this file; the name
# of the link says which figure. docs/reproduce.md lists them, --help lists the options.
#
# Uses the first stack whose Python exists: today's, the paper's (3.8), the Jetson TX2's (3.6).
# STACK=today, paper or tx2 overrides this. Checks the arguments before anything is installed.
# PYTHON=python3 uses that interpreter as it is, and installs nothing.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/_venv.sh"

FIGURE_SCRIPT=$(basename "$0")
export FIGURE_SCRIPT
figure=${FIGURE_SCRIPT#run_figure}
figure=${figure#_}
reproduce=("$ROOT/scripts/reproduce.py" "${figure%.sh}")

if [ -n "${PYTHON:-}" ]; then
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 6))' 2>/dev/null ||
        { echo "error: PYTHON=$PYTHON does not run, or is older than 3.6" >&2; exit 2; }
    exec "$PYTHON" "${reproduce[@]}" "$@"
fi
stack=${STACK:-}
if [ -z "$stack" ]; then
    stacks='today paper tx2'
    [ "$(uname -m)" != aarch64 ] || stacks='today tx2'  # TensorFlow 2.7 does not exist there
    for candidate in $stacks; do
        if [ -x "$ROOT/$(venv_name "$candidate")/bin/python" ] || find_python "$candidate" >/dev/null; then
            stack=$candidate
            break
        fi
    done
    [ -n "$stack" ] || case $(python3 --version 2>&1) in
        'Python 3.6.'*) stack=tx2 ;;  # it lacks its venv module; ensure_venv says so
        *) stack=today ;;
    esac
fi
if base=$(find_python "$stack"); then
    case " $* " in
        *' -h '* | *' --help '*) exec "$base" "${reproduce[@]}" "$@" ;;
    esac
    "$base" "${reproduce[@]}" --check "$@"
fi
ensure_venv "$stack"
exec "$PYTHON" "${reproduce[@]}" "$@"
