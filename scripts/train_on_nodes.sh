#!/usr/bin/env bash
# Train on several nodes from one machine, over ssh:
#
#   bash scripts/train_on_nodes.sh HOSTS_FILE [--sync] [--fetch] [...] -- SCRIPT TRAINING OPTIONS
#
#   HOSTS_FILE  one ssh host per line, in the order of node ranks; see scripts/ssh/hosts.py
#   SCRIPT      such as imagenet_ddp.py, with its options as typed on one node
#
# -H a:2,b:2 stands in for HOSTS_FILE, with the processes of each host: horovodrun's lines
# (-np 4 -H a:2,b:2 python imagenet_ddp.py ...) can be typed as they are.
#
# --elastic MIN:MAX goes on when nodes fail, whichever, and takes those in that come back. The run
# directory must then be on a file system that the nodes share.
#
# Ctrl-C stops the training with a snapshot, a second one ends it at once. --help lists the options.
# Needs Python and ssh here, Python and sshd on the nodes; rsync for --sync and --fetch.
set -euo pipefail
export IMAGENET_SUITE=launcher # the mark by which scripts/cleanup.sh knows its own
exec "${PYTHON:-python3}" "$(dirname "$0")/ssh/launcher.py" "$@"
