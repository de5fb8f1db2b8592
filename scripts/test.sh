#!/usr/bin/env bash
# Set up the environment, then check style, spelling and types, and run the tests:
#
#   bash scripts/test.sh [PYTEST OPTIONS]
#   bash scripts/test.sh -k resume -x  # tests named *resume*, until one fails
#   bash scripts/test.sh -m long       # the tests that take long
#   bash scripts/test.sh -m cuda       # tests that need a GPU
#   TORCH=oldest bash scripts/test.sh  # in .venv-oldest, with the oldest torch
[[ $- == *p* ]] || exec "$BASH" -p "$0" "$@" # without functions that the caller exports
set -euo pipefail
source "$(dirname "$0")/environment.sh"
show_help "$@"
cd "$root"
use_environment tests/requirements.txt

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m codespell_lib
# Types are those of the tested versions; older ones of torch describe their own in another way.
[ "${TORCH:-}" = oldest ] || "$PYTHON" -m basedpyright --pythonpath "$PYTHON"
# One thread per process: the tests run several processes at once.
export OMP_NUM_THREADS=1
python=$PYTHON
unset TORCH PYTHON # or the wrappers under test would use them
# Two workers for each core, as many tests wait: for signals, limits of time, other nodes.
exec "$python" -m pytest -n "$((2 * $(OMP_NUM_THREADS= nproc)))" --maxprocesses 16 --dist loadfile \
    --no-loadscope-reorder "$@"
