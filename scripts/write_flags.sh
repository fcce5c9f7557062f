#!/usr/bin/env bash
# Prints docs/flags.md, the --help of every command at the root:
#
#   scripts/write_flags.sh > docs/flags.md
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/_venv.sh"

[ -n "${PYTHON-}" ] || ensure_venv today
cd "$ROOT"
echo '# Flags'
echo
echo 'Made from `--help` by `scripts/write_flags.sh > docs/flags.md`; a test compares the two.'
for script in main.py profiler.py plot.py metered.py thermal.py; do
    printf '\n## python %s\n\n' "$script"
    COLUMNS=100 "$PYTHON" "$script" --help | sed 's/^\(.\)/    \1/'
done
