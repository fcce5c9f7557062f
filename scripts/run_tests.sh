#!/usr/bin/env bash
# Runs lint and tests; makes or updates the virtual environment first.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/_venv.sh"

usage() {
    cat <<END
usage: run_tests.sh [--stack today|paper|tx2] [--all] [pytest arguments]

Makes or updates the virtual environment, lints (today's stack only), then tests: within four minutes
on two cores, in up to four processes, one more than there are cores, since tests also wait. Its last
line says how many tests passed.
  --stack today    .venv, Python 3.11, TensorFlow 2.21 (the default)
  --stack paper    .venv-paper, Python 3.8, TensorFlow 2.7
  --stack tx2      .venv-tx2, Python 3.6, TensorFlow 2.6: nearest to the Jetson TX2's on a PC
  --all            also runs the tests marked thorough, and those that compare times, which run alone:
                   about eleven minutes
All other arguments go to pytest; paths are relative to the repository:
  scripts/run_tests.sh tests/test_selection_solver_DP.py -k paper
  scripts/run_tests.sh -n 0 --pdb        one process, for the debugger
END
}

python_files() {  # tracked and new ones; without git, all outside hidden folders
    git ls-files -co --exclude-standard -- '*.py' 2>/dev/null || find . -name '*.py' ! -path '*/.*'
}

stack=today all=
arguments=()
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit ;;
        --stack) stack=${2-}; shift $(($# > 1)) ;;
        --stack=*) stack=${1#--stack=} ;;
        --all) all=1; arguments+=("$1") ;;
        *) arguments+=("$1") ;;
    esac
    shift
done
stack_versions "$stack" >/dev/null

cd "$ROOT"
ensure_venv "$stack" dev
start=$SECONDS
if [ "$stack" = today ]; then
    "$PYTHON" -m ruff check
    # Started by itself, vermin would look for Python where the environment was made.
    python_files | while read -r file; do [ ! -e "$file" ] || echo "$file"; done |
        xargs "$PYTHON" "$(dirname "$PYTHON")/vermin" -q -t=3.6- --no-tips --violations
fi

TEST_COUNTS=$(mktemp)  # tests/conftest.py adds a line for each call of pytest
export TEST_COUNTS
trap 'rm -f "$TEST_COUNTS"' EXIT
status=0
run_pytest() {  # keeps pytest's status in `status`; "no test was selected" (5) is judged at the end
    local code=0
    "$PYTHON" -m pytest "$@" ${arguments[@]+"${arguments[@]}"} || code=$?
    [ "$code" = 0 ] || [ "$code" = 5 ] || status=$code
}
processes=$("$PYTHON" -c 'from elastic.device.host import usable_cpus; print(min(4, len(usable_cpus()) + 1))')
run_pytest -m 'not timing' -n "$processes" --dist loadfile
[ -z "$all" ] || run_pytest -m timing
read -r passed failed skipped < <(awk '{ p += $1; f += $2; s += $3 } END { print p+0, f+0, s+0 }' "$TEST_COUNTS")
[ $((passed + failed + skipped)) -gt 0 ] || [ "$status" != 0 ] || status=5
echo "$passed tests passed, $failed failed, $skipped skipped in $((SECONDS - start)) s${all:+ (all tests)}"
exit "$status"
