#!/usr/bin/env bash
# Show what this user's runs are doing, here or on the hosts in a file, all ranks together:
#
#   bash scripts/status.sh [HOSTS_FILE] [--ssh COMMAND]          (watch -n 10 bash scripts/status.sh)
#
# All ranks of a run show the same images/s, as all wait for the slowest. So each also shows its own
# part of a step in seconds: waiting for its images (data_s), and computing until its gradients are
# ready (comp_s). A rank whose part is more than a quarter longer than the median is marked as the
# straggler that the others wait for.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "$0")/ssh/status.py" "$@"
