#!/usr/bin/env bash
# Figure 23: energy of full training, head only, BN + bias and elastic training at rho 0.5, ResNet50
# on CUB-200, Oxford-IIIT Pet and Stanford Dogs. Its runs are those of figure 15 (33 h on a Jetson
# TX2) and, but for the dogs, of figure 16 (221 h on a Raspberry Pi 4B, with --meter_csv).
# --only caltech or --only iiit leaves data sets out: drawn are those that are complete.
# Options: --dry_run, --rehearse, --only PATTERN, --seeds N, --jobs FILE; see --help.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/_figure.sh"
