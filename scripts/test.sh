#!/usr/bin/env bash
# Set up the environment, then run lint, format check and tests:
#
#   bash scripts/test.sh [PYTEST OPTIONS]
#   TORCH=oldest bash scripts/test.sh [PYTEST OPTIONS]  # in .venv-oldest, with the oldest torch
set -euo pipefail
source "$(dirname "$0")/environment.sh"
show_help "$@"
cd "$root"
use_environment tests/requirements.txt

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
# One thread per process: the tests run several processes at once.
export OMP_NUM_THREADS=1
unset TORCH # which the wrappers would heed
exec "$PYTHON" -m pytest -n auto --dist loadfile "$@"
