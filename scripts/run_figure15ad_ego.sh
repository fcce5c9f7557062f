#!/usr/bin/env bash
# Figure 15 a, d with elastic training alone: ResNet50 on CUB-200 at rho 0.5. The paper gives no
# hours for it; for figure 15 with elastic training alone it gives 6.5 h on a Jetson TX2.
# Options: --dry_run, --rehearse, --only PATTERN, --seeds N, --jobs FILE; see --help.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/_figure.sh"
