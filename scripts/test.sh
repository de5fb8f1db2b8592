#!/usr/bin/env bash
# Set up the environment, then run lint, format check and tests:
#
#   bash scripts/test.sh [PYTEST OPTIONS]
#   bash scripts/test.sh -k resume -x     # tests named *resume*, up to the first failure
#   bash scripts/test.sh -m long          # tests that take minutes each, hours in all
#   bash scripts/test.sh -m cuda          # tests that need a GPU
#   TORCH=oldest bash scripts/test.sh     # in .venv-oldest, with the oldest torch
set -euo pipefail
source "$(dirname "$0")/environment.sh"
show_help "$@"
cd "$root"
use_environment tests/requirements.txt

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
# One thread per process: the tests run several processes at once.
export OMP_NUM_THREADS=1
unset TORCH # or the wrappers under test would use it
exec "$PYTHON" -m pytest -n auto --dist loadfile "$@"
