#!/usr/bin/env bash
# Sets up the environment and runs lint, format check and tests: bash scripts/test.sh [PYTEST OPTIONS]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
use_environment tests/requirements.txt

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
# One thread a process: the tests run several processes at once on the cores there are.
export OMP_NUM_THREADS=1
exec "$PYTHON" -m pytest -n auto --dist loadfile "$@"
