#!/usr/bin/env bash
# Everything that this project wants to know from a machine with GPUs, in one sitting:
#
#   bash scripts/gpu_report.sh [--minutes 9] [--out gpu_report] [--device cpu]
#
# Runs the tests that need a GPU and the measurements, the most important first, as far as the time
# goes, and writes OUT/gpu_report.md with OUT/gpu_report.json beside it after each part. A part that
# fails is named there, and the rest go on. It needs no internet and nothing beyond requirements.txt
# (pytest for the tests). --device cpu tries all of it, small, without a GPU.
#
# Exit code: 0 all parts that were run succeeded, 1 some failed, 2 there is no GPU.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && [ -z "${VIRTUAL_ENV:-}" ] && [ -x "$here/.venv/bin/python" ]; then
    python=$here/.venv/bin/python
fi
exec "$python" "$here/scripts/gpu_report/report.py" "$@"
