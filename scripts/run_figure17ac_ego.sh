#!/usr/bin/env bash
# Figure 17 a, c with elastic training alone: ResNet50 on CUB-200 at rho 0.35, 0.4, 0.5, 0.6 and
# 0.7. The paper's own runs took 9 h on a Jetson TX2, 85 h on a Raspberry Pi 4B.
# Options: --dry_run, --rehearse, --only PATTERN, --seeds N, --jobs FILE; see --help.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/_figure.sh"
