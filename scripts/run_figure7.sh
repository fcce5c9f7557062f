#!/usr/bin/env bash
# Figure 7: similarity and cost of the tensor importances of successive selections, by selection
# interval and by number of probe batches; ResNet50 on CUB-200. The paper gives no hours.
# Options: --dry_run, --rehearse, --only PATTERN, --seeds N, --jobs FILE; see --help.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/_figure.sh"
