#!/usr/bin/env bash
# Train on 1, 2, 4, ... nodes, one run after the other, and keep a log book of it; see --help.
set -euo pipefail
export IMAGENET_SUITE=launcher # scripts/cleanup.sh recognises it
scripts=$(cd "$(dirname "$0")" && pwd) own=$(dirname "$0")/../.venv/bin/python
[ -n "${PYTHON:-}${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] || [ ! -x "$own" ] || PYTHON=$own
exec "${PYTHON:-python3}" "$scripts/scaling_study.py" "$@"
