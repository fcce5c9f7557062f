#!/usr/bin/env bash
# Figure 15 a-f with elastic training alone: ResNet50 on CUB-200, Oxford-IIIT Pet and Stanford Dogs
# at rho 0.5. The paper's own runs took 6.5 h on a Jetson TX2.
# Options: --dry_run, --rehearse, --only PATTERN, --seeds N, --jobs FILE; see --help.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/_figure.sh"
