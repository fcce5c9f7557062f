#!/usr/bin/env bash
# Figure 19 with elastic training alone: ResNet50, VGG16 and MobileNetV2 on CUB-200 at rho 0.4. The
# paper's own runs took 3.5 h on a Jetson TX2, 50 h on a Raspberry Pi 4B.
# Options: --dry_run, --rehearse, --only PATTERN, --seeds N, --jobs FILE; see --help.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/_figure.sh"
