#!/usr/bin/env bash
# Train on several nodes from one machine, over ssh:
#
#   bash scripts/train_on_nodes.sh HOSTS_FILE [--sync] [--fetch] [...] -- SCRIPT TRAINING OPTIONS
#
#   HOSTS_FILE  one ssh host per line, in the order of node ranks; see scripts/ssh/hosts.py
#   SCRIPT      such as imagenet_ddp.py, with its options as typed on one node
#
# -H a:2,b:2 can be given instead of HOSTS_FILE, with the number of processes of each host:
# horovodrun's commands (-np 4 -H a:2,b:2 python imagenet_ddp.py ...) work unchanged.
#
# With --elastic MIN:MAX training continues when a node fails, and takes it in again when it comes
# back. The run directory must then be on a file system that all nodes share.
#
# Ctrl-C stops the run with a snapshot, a second one ends it at once. --help lists the options.
# Needs Python and ssh here, Python and sshd on the nodes; rsync for --sync and --fetch.
set -euo pipefail
export IMAGENET_SUITE=launcher # the mark by which scripts/cleanup.sh knows its own
exec "${PYTHON:-python3}" "$(dirname "$0")/ssh/launcher.py" "$@"
