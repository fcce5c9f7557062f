#!/usr/bin/env bash
# Figure 23: energy of full training, head only, BN + bias and elastic training at rho 0.5, ResNet50
# on CUB-200, Oxford-IIIT Pet and Stanford Dogs. It shares the runs of figure 15 (33 h on a Jetson
# TX2), or without the dogs those of figure 16 (221 h on a Raspberry Pi 4B, with --meter_csv).
# --only caltech or --only iiit trains on one data set; the figure shows the complete ones.
# Options: --dry_run, --rehearse, --only PATTERN, --seeds N, --jobs FILE; see --help.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/_figure.sh"
