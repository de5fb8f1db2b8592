#!/usr/bin/env bash
# End what this suite has left running, of this user, here or on the hosts of a file:
#
#   bash scripts/cleanup.sh [HOSTS_FILE] [--dry-run] [--grace SECONDS] [--ssh COMMAND]
#
# Training processes, loader workers, launchers and orphans get SIGTERM and time for a snapshot,
# then SIGKILL. No other program is touched, Python or not. --dry-run only lists them.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "$0")/ssh/cleanup.py" "$@"
