#!/usr/bin/env bash
# Train on 1, 2, 4, ... nodes, one arm after the other, and keep a log book of it:
#
#   bash scripts/scaling_study.sh HOSTS_FILE --nodes 1,2,4,8 --hours 2 [...] -- SCRIPT OPTIONS DATA
#   bash scripts/scaling_study.sh --simulate 2 [...] -- SCRIPT OPTIONS DATA    # on this machine
#
#   HOSTS_FILE  one ssh host per line, in the order of node ranks; see scripts/ssh/hosts.py
#   SCRIPT      such as imagenet_ddp.py, with its options as typed on one node
#
# If it is interrupted, run the same command again: finished arms are not repeated, an unfinished
# one resumes from its snapshot. --dry-run prints the commands; --help lists the options.
# Needs what requirements.txt lists here; the nodes as for scripts/train_on_nodes.sh.
set -euo pipefail
export IMAGENET_SUITE=launcher # the mark by which scripts/cleanup.sh knows its own
here=$(cd "$(dirname "$0")" && pwd)
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] || [ ! -x "$here/../.venv/bin/python" ] ||
        PYTHON=$here/../.venv/bin/python
fi
exec "$PYTHON" "$here/scaling_study.py" "$@"
