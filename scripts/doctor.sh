#!/usr/bin/env bash
# Check all nodes before training on them, from one machine, over ssh:
#
#   bash scripts/doctor.sh HOSTS_FILE [--dir DIR] [--python FILE] [--ssh COMMAND] [--env NAME=VALUE]
#       [OPTIONS of scripts/doctor.py: --data DIR -a resnet50 ...]
#
#   HOSTS_FILE  one ssh host per line, in the order of node ranks; see scripts/ssh/hosts.py
#
# Exit code: 0 all is well, 1 warnings, 2 faults. Needs Python and ssh here; sshd and the code on
# the nodes.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "$0")/doctor.py" over-ssh "$@"
