#!/usr/bin/env bash
# What this device is, and what on it stands in the way of training: a line for each thing, with its
# remedy. Installs and changes nothing. See --help, or check_device.py, which this runs.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/_venv.sh"

# The environment's Python tells most; else any will do, as it needs the standard library alone.
for python in "${PYTHON:-}" "$ROOT"/.venv/bin/python "$ROOT"/.venv-*/bin/python python3 \
        "$(find_python today || true)"; do
    if [ -n "$python" ] &&
            "$python" -c 'import sys; sys.exit(sys.version_info < (3, 6))' >/dev/null 2>&1; then
        exec "$python" "$ROOT/scripts/check_device.py" "$@"
    fi
done
echo "error: no Python from 3.6 found; on Debian and Ubuntu: sudo apt install python3 python3-venv" >&2
exit 1
