#!/usr/bin/env bash
# Everything that this project wants to know from a machine with GPUs:
#
#   bash scripts/gpu_report.sh [--minutes 15] [--out gpu_report] [--device cpu]
#
# Runs the tests that need a GPU and the measurements, the most important first, as far as the time
# goes, and writes OUT/gpu_report.md after each part. A part that fails is named there, and the rest
# go on. A part that does not end in time is given less work, and the page says what was left out. Without internet and pytest, the tests are left out. --device cpu tries all of it, small,
# without a GPU.
#
# Exit code: 0 all parts that were run succeeded, 1 some failed, 2 there is no usable GPU.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
show_help "$@"
tests=("$root/tests/requirements.txt")
(use_environment "${tests[@]}") || tests=() # without internet: what there is
use_environment "${tests[@]}"
exec "$PYTHON" "$root/scripts/gpu_report.py" "$@"
