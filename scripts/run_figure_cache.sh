#!/usr/bin/env bash
# Figure cache, not in the paper: what the prefix cache is worth. ResNet50 on CUB-200, elastic
# training at rho 0.5 and 0.25 on fresh views, on views held between selections, and on held views
# with the cache. Without it the forward pass leaves nothing of rho 0.25 on most devices.
# Options: --dry_run, --rehearse, --only PATTERN, --seeds N, --jobs FILE; see --help.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/_figure.sh"
