#!/usr/bin/env bash
# Stop this user's training processes, on this machine or on the hosts in a file; see --help.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "$0")/ssh/cleanup.py" "$@"
