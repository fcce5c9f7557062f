#!/usr/bin/env bash
# Figure cache, not in the paper: what the prefix cache gains. ResNet50 on CUB-200, elastic training at
# rho 0.5 and 0.25 with fresh augmentation, with fixed augmentation, and with the cache. Without the
# cache, the forward pass alone exceeds rho 0.25 on most devices.
# Options: --dry_run, --rehearse, --only PATTERN, --seeds N, --jobs FILE; see --help.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/_figure.sh"
