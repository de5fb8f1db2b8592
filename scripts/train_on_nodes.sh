#!/usr/bin/env bash
# Train on several nodes from one machine, over ssh. --help lists the options.
#
#   bash scripts/train_on_nodes.sh HOSTS_FILE [--sync] [--fetch] [...] -- SCRIPT TRAINING OPTIONS
#   bash scripts/train_on_nodes.sh -np 4 -H a:2,b:2 python SCRIPT TRAINING OPTIONS  # as horovodrun
#
# HOSTS_FILE has one ssh host per line, in the order of node ranks; see scripts/ssh/hosts.py. With
# --elastic MIN:MAX nodes may fail and come back; the run directory must be on a file system that
# all nodes share. Ctrl-C stops the run with a snapshot; a second Ctrl-C ends it at once. Needs
# Python and ssh on this machine (with --elastic also torch), Python and sshd on the nodes. --sync
# and --fetch also need rsync.
[[ $- == *p* ]] || exec "$BASH" -p "$0" "$@" # without functions that the caller exports
set -euo pipefail
source "$(dirname "$0")/environment.sh"
export IMAGENET_SUITE=launcher # scripts/cleanup.sh recognises it
find_plain_python
exec "$PYTHON" "$root/scripts/ssh/launcher.py" "$@"
