#!/usr/bin/env bash
# Figure 17 a, c: ResNet50 on CUB-200, elastic training at rho 0.35, 0.4, 0.5, 0.6 and 0.7 beside
# full training, head only, BN + bias and PruneTrain: accuracy and training time. The paper's own
# runs took 15 h on a Jetson TX2, 190 h on a Raspberry Pi 4B.
# Options: --dry_run, --rehearse, --only PATTERN, --seeds N, --jobs FILE; see --help.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/_figure.sh"
