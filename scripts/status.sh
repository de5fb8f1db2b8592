#!/usr/bin/env bash
# Show what this user's runs are doing, here or on the hosts in a file; see --help.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "$0")/ssh/status.py" "$@"
