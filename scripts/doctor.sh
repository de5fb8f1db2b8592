#!/usr/bin/env bash
# Check this machine, or all nodes over ssh, before training on them; see --help.
[[ $- == *p* ]] || exec "$BASH" -p "$0" "$@" # without functions that the caller exports
set -euo pipefail
source "$(dirname "$0")/environment.sh"
find_python
exec "$PYTHON" "$root/scripts/doctor.py" "$@"
