#!/usr/bin/env bash
# Reports what this device is, and what on it stands in the way of training, with remedies: runs
# check_device.py. Installs and changes nothing.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/_venv.sh"

# The environment's Python can report most. Any other works as well, as check_device.py needs only
# the standard library.
for python in "${PYTHON:-}" "$ROOT"/.venv/bin/python "$ROOT"/.venv-*/bin/python python3 \
        "$(find_python today || true)"; do
    if [ -n "$python" ] &&
            "$python" -c 'import sys; sys.exit(sys.version_info < (3, 6))' >/dev/null 2>&1; then
        exec "$python" "$ROOT/scripts/check_device.py" "$@"
    fi
done
echo "error: no Python 3.6 or later found; on Debian and Ubuntu: sudo apt install python3 python3-venv" >&2
exit 1
