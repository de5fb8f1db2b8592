#!/usr/bin/env bash
# End what this user's runs have left running, here or on the hosts in a file:
#
#   bash scripts/cleanup.sh [HOSTS_FILE] [--name RUN] [--dry-run] [--yes] [--grace SECONDS]
#       [--ssh COMMAND]
#
# Training processes, loader workers, launchers and orphans get SIGTERM and time for a snapshot,
# then SIGKILL. No other program, Python or not, is touched. Without --name this ends all runs under
# this login, a colleague's too. On a terminal it lists them and asks first, unless there is --yes.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "$0")/ssh/cleanup.py" "$@"
