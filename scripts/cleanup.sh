#!/usr/bin/env bash
# End what this user's trainings have left running, here or on the hosts in a file:
#
#   bash scripts/cleanup.sh [HOSTS_FILE] [--dry-run] [--grace SECONDS] [--ssh COMMAND]
#
# Training processes, loader workers, launchers and orphans get SIGTERM and time for a snapshot,
# then SIGKILL. No other program, Python or not, is touched. --dry-run only lists what would end.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "$0")/ssh/cleanup.py" "$@"
