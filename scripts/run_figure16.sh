#!/usr/bin/env bash
# Figure 16 a-d: ResNet50 on CUB-200 and Oxford-IIIT Pet, full training, head only, BN + bias and
# elastic training at rho 0.5: test accuracy and loss over training time. The paper's own runs took
# 221 h on a Raspberry Pi 4B.
# Options: --dry_run, --rehearse, --only PATTERN, --seeds N, --jobs FILE; see --help.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/_figure.sh"
