#!/usr/bin/env bash
# Figure 21: which tensors elastic training trained in which epoch, ResNet50 on CUB-200, Oxford-IIIT
# Pet and Stanford Dogs. It shares the elastic runs of figure 15 (6.5 h on a Jetson TX2).
# Options: --dry_run, --rehearse, --only PATTERN, --seeds N, --jobs FILE; see --help.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/_figure.sh"
