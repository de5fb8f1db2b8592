#!/usr/bin/env bash
# Train on 1, 2, 4, ... nodes, one run after the other, and keep a log book of it; see --help.
[[ $- == *p* ]] || exec "$BASH" -p "$0" "$@" # without functions that the caller exports
set -euo pipefail
source "$(dirname "$0")/environment.sh"
export IMAGENET_SUITE=launcher # scripts/cleanup.sh recognises it
find_python
exec "$PYTHON" "$root/scripts/scaling_study.py" "$@"
