#!/usr/bin/env bash
# Test and benchmark a machine with GPUs, and write a report:
#
#   bash scripts/gpu_report.sh [--minutes 15] [--out gpu_report] [--device cpu]
#
# Runs the tests that need a GPU, then the benchmarks, the most important first.
# It stops after --minutes. OUT/gpu_report.md is updated after each part. If a
# part fails, the report says so, and the other parts still run. A part that takes
# too long runs again with less work, and the report names what was left out.
# Without internet and pytest, the tests are left out. --device cpu tests the
# report itself, with little work and without a GPU.
#
# Exit code: 0 all parts that ran succeeded, 1 some failed, 2 there is no usable
# GPU.
[[ $- == *p* ]] || exec "$BASH" -p "$0" "$@" # without functions that the caller exports
set -euo pipefail
source "$(dirname "$0")/environment.sh"
show_help "$@"
tests=("$root/tests/requirements.txt")
(use_environment "${tests[@]}") || tests=() # without internet: use what is installed
use_environment "${tests[@]}"
exec "$PYTHON" "$root/scripts/gpu_report.py" "$@"
