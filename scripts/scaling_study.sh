#!/usr/bin/env bash
# Train on 1, 2, 4, ... nodes, one run after the other, and keep a log book of it; see --help.
set -euo pipefail
export IMAGENET_SUITE=launcher # the mark by which scripts/cleanup.sh knows its own
here=$(cd "$(dirname "$0")" && pwd)
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] || [ ! -x "$here/../.venv/bin/python" ] ||
        PYTHON=$here/../.venv/bin/python
fi
exec "$PYTHON" "$here/scaling_study.py" "$@"
