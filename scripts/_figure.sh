# Sourced by run_figure*.sh: runs reproduce.py for the figure that the script is named after.
#
# The environment is today's where its Python is there, else the paper's (a Jetson's Python 3.8);
# STACK=today or STACK=paper decides otherwise. Arguments are checked before anything is installed.
# PYTHON=python3 takes that interpreter as it is and installs nothing: for a board whose TensorFlow
# comes from its maker, such as a Jetson TX2 with NVIDIA's own for Python 3.6.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/_venv.sh"

FIGURE_SCRIPT=$(basename "$0")
export FIGURE_SCRIPT
figure=${FIGURE_SCRIPT#run_figure}
figure=${figure#_}
figure=${figure%.sh}
if [ -n "${PYTHON:-}" ]; then
    "$PYTHON" -c '' || { echo "error: PYTHON=$PYTHON does not run" >&2; exit 2; }
    exec "$PYTHON" "$ROOT/scripts/reproduce.py" "$figure" "$@"
fi
stack=${STACK:-}
if [ -z "$stack" ]; then
    stack=today
    if [ ! -x "$ROOT/.venv/bin/python" ] && ! find_python today >/dev/null; then
        if [ -x "$ROOT/.venv-paper/bin/python" ] || find_python paper >/dev/null; then
            stack=paper
        fi
    fi
fi
if base=$(find_python "$stack"); then
    case " $* " in
        *' -h '* | *' --help '*) exec "$base" "$ROOT/scripts/reproduce.py" "$figure" "$@" ;;
    esac
    "$base" "$ROOT/scripts/reproduce.py" "$figure" --check "$@"
fi
ensure_venv "$stack"
exec "$PYTHON" "$ROOT/scripts/reproduce.py" "$figure" "$@"
