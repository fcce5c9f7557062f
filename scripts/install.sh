#!/usr/bin/env bash
# Makes or updates the virtual environment of a stack, and nothing else.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/_venv.sh"

usage() {
    cat <<END
usage: install.sh [--stack today|paper|tx2]

Installs requirements.txt in a virtual environment of this folder (3 GB, 1 to 10 minutes). Run it
again after an update of the repository: it installs what changed.
  --stack today    .venv, Python 3.11, TensorFlow 2.21 (the default)
  --stack paper    .venv-paper, Python 3.8, TensorFlow 2.7
  --stack tx2      .venv-tx2, Python 3.6, TensorFlow 2.6, or NVIDIA's own on a Jetson TX2
END
}

stack=today
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit ;;
        --stack) stack=${2-}; shift $(($# > 1)) ;;
        --stack=*) stack=${1#--stack=} ;;
        *) echo "error: unknown argument '$1'; see --help" >&2; exit 2 ;;
    esac
    shift
done

ensure_venv "$stack"
echo "To use it: . $(venv_name "$stack")/bin/activate"
