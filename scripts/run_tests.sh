#!/usr/bin/env bash
# Runs lint and tests; makes or updates the virtual environment first.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/_venv.sh"

usage() {
    cat <<END
usage: run_tests.sh [--stack today|paper|tx2] [--quick] [pytest arguments]

Makes or updates the virtual environment, lints (today's stack only), then runs pytest. Tests that
compare times run alone. All others run in up to four processes, one more than there are cores,
since tests also wait.
  --stack today    .venv, Python 3.11, TensorFlow 2.21 (the default)
  --stack paper    .venv-paper, Python 3.8, TensorFlow 2.7
  --stack tx2      .venv-tx2, Python 3.6, TensorFlow 2.6: nearest to the Jetson TX2's on a PC
  --quick          one to two minutes: without lint, tests that compare times, and the slow tests in
                   tests/slow_tests.txt
All other arguments go to pytest; paths are relative to the repository:
  scripts/run_tests.sh tests/test_selection_solver_DP.py -k paper
  scripts/run_tests.sh -n 0 --pdb        one process, for the debugger
  scripts/run_tests.sh --durations=0     with the seconds of each test
END
}

python_files() {  # tracked and new ones; without git, all outside hidden folders
    git ls-files -co --exclude-standard -- '*.py' 2>/dev/null || find . -name '*.py' ! -path '*/.*'
}

stack=today quick=
arguments=()
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit ;;
        --stack) stack=${2-}; shift $(($# > 1)) ;;
        --stack=*) stack=${1#--stack=} ;;
        --quick) quick=1; arguments+=("$1") ;;
        *) arguments+=("$1") ;;
    esac
    shift
done
stack_versions "$stack" >/dev/null

cd "$ROOT"
ensure_venv "$stack"
if [ "$stack" = today ] && [ -z "$quick" ]; then
    "$PYTHON" -m ruff check
    # Started by itself, vermin would look for Python where the environment was made.
    python_files | while read -r file; do [ ! -e "$file" ] || echo "$file"; done |
        xargs "$PYTHON" "$(dirname "$PYTHON")/vermin" -q -t=3.6- --no-tips --violations
fi

run_pytest() {  # keeps pytest's status in `status`; counts "no test was selected" (5) in `empty`
    local code=0
    "$PYTHON" -m pytest "$@" ${arguments[@]+"${arguments[@]}"} || code=$?
    [ "$code" -ne 5 ] || { empty=$((empty + 1)); code=0; }
    [ "$code" -eq 0 ] || status=$code
}
status=0 empty=0
processes=$("$PYTHON" -c 'from elastic.command_line import usable_cpus; print(min(4, len(usable_cpus()) + 1))')
run_pytest -m 'not timing' -n "$processes" --dist loadfile
[ -n "$quick" ] || run_pytest -m timing
[ "$empty" -lt $((quick ? 1 : 2)) ] || status=5
exit "$status"
