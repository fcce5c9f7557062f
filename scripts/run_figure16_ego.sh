#!/usr/bin/env bash
# Figure 16 a-d with elastic training alone: ResNet50 on CUB-200 and Oxford-IIIT Pet at rho 0.5. The
# paper's own runs took 52 h on a Raspberry Pi 4B.
# Options: --dry_run, --rehearse, --only PATTERN, --seeds N, --jobs FILE; see --help.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/_figure.sh"
