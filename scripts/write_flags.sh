#!/usr/bin/env bash
# Prints docs/flags.md, the --help of every command:
#
#   scripts/write_flags.sh > docs/flags.md
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/_venv.sh"

[ -n "${PYTHON-}" ] || ensure_venv today
cd "$ROOT"
echo '# Flags'
echo
echo 'Made from `--help` by `scripts/write_flags.sh > docs/flags.md`; a test compares the two.'
for command in main.py profiler.py plot.py scripts/predict.py scripts/evaluate.py \
    '-m elastic.runs.metered' '-m elastic.device.thermal'; do
    printf '\n## python %s\n\n' "$command"
    # shellcheck disable=SC2086  # two words
    COLUMNS=100 "$PYTHON" $command --help | sed 's/^\(.\)/    \1/'
done
