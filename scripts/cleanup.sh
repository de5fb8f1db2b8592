#!/usr/bin/env bash
# End what this user's runs have left running, here or on the hosts in a file; see --help.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "$0")/ssh/cleanup.py" "$@"
