#!/usr/bin/env bash
# Figure 15 a-f: ResNet50 on CUB-200, Oxford-IIIT Pet and Stanford Dogs, full training, head only,
# BN + bias and elastic training at rho 0.5: test accuracy and loss over training time. The paper's
# own runs took 33 h on a Jetson TX2.
# Options: --dry_run, --rehearse, --only PATTERN, --seeds N, --jobs FILE; see --help.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/_figure.sh"
