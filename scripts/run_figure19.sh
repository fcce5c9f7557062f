#!/usr/bin/env bash
# Figure 19: ResNet50, VGG16 and MobileNetV2 on CUB-200, elastic training at rho 0.4 beside full
# training, head only and BN + bias: accuracy and training time. The paper's own runs took 20 h on a
# Jetson TX2, 310 h on a Raspberry Pi 4B.
# Options: --dry_run, --rehearse, --only PATTERN, --seeds N, --jobs FILE; see --help.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/_figure.sh"
