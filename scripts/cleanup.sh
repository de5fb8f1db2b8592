#!/usr/bin/env bash
# Stop this user's training processes, on this machine or on the hosts in a file; see --help.
[[ $- == *p* ]] || exec "$BASH" -p "$0" "$@" # without functions that the caller exports
set -euo pipefail
source "$(dirname "$0")/environment.sh"
find_plain_python
exec "$PYTHON" "$root/scripts/ssh/cleanup.py" "$@"
