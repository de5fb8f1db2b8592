#!/usr/bin/env bash
# Check this machine, or all nodes over ssh, before training on them:
#
#   bash scripts/doctor.sh [OPTIONS of scripts/doctor.py: --data DIR -a resnet50 ...]
#   bash scripts/doctor.sh HOSTS_FILE [--dir DIR] [--python FILE] [--ssh COMMAND] [--env NAME=VALUE]
#       [OPTIONS of scripts/doctor.py]
#
# Exit code: 0 all is well, 1 warnings, 2 faults. Needs Python and ssh here; sshd and the code on
# the nodes.
set -euo pipefail
over_ssh=(over-ssh)
[[ ${1:--} != -* || ${1:-} == @(-h|--help|--dir*|--python*|--ssh*|--env*) ]] || over_ssh=()
exec "${PYTHON:-python3}" "$(dirname "$0")/doctor.py" "${over_ssh[@]}" "$@"
