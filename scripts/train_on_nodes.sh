#!/usr/bin/env bash
# Train on several nodes from one machine, over ssh:
#
#   bash scripts/train_on_nodes.sh HOSTS_FILE [--sync] [--fetch] [...] -- SCRIPT TRAINING OPTIONS
#
#   HOSTS_FILE  one ssh host a line, in the order of node ranks; see scripts/ssh/hosts.py
#   SCRIPT      imagenet_ddp.py, say, with its options as typed on one node
#
# Ctrl-C asks for a snapshot and the end, a second one ends at once. --help lists the options.
# Needs Python and ssh here, Python and sshd on the nodes; rsync for --sync and --fetch.
set -euo pipefail
export IMAGENET_SUITE=launcher # by this mark scripts/cleanup.sh knows its own
exec "${PYTHON:-python3}" "$(dirname "$0")/ssh/launcher.py" "$@"
