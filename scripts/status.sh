#!/usr/bin/env bash
# Show what this user's runs are doing, here or on the hosts in a file, all ranks together:
#
#   bash scripts/status.sh [HOSTS_FILE] [--ssh COMMAND]          (watch -n 10 bash scripts/status.sh)
#
# Each rank shows its own part of a step in seconds: waiting for its images (data_s), and computing
# until its gradients are ready (comp_s). All others wait for a rank that is marked as a straggler.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "$0")/ssh/status.py" "$@"
