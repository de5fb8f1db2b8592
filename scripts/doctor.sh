#!/usr/bin/env bash
# Check this machine, or all nodes over ssh, before training on them; see --help.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "$0")/doctor.py" "$@"
