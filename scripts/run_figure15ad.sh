#!/usr/bin/env bash
# Figure 15 a, d, the minimal example: ResNet50 on CUB-200, full training, head only, BN + bias and
# elastic training at rho 0.5: test accuracy and loss over training time. The paper's own runs took
# 10 h on a Jetson TX2.
# Options: --dry_run, --rehearse, --only PATTERN, --seeds N, --jobs FILE; see --help.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/_figure.sh"
