#!/usr/bin/env bash
# Train on this machine alone:
#
#   bash scripts/one_node_train.sh \
#       TRAIN_HOURS SAVE_NAME BATCH_SIZE [-- TRAINING OPTIONS]
#
#   TRAIN_HOURS  stop with a snapshot after this many hours of training (3.0).
#                Epochs are then unlimited and the learning rate constant,
#                unless --epochs or --recipe is given
#   SAVE_NAME    name of the run, in runs/SAVE_NAME; an existing run is resumed
#   BATCH_SIZE   images per step and process (per GPU)
#
# In the environment: DATA, ARCH, SCRIPT, NPROC; see scripts/launch.sh.
[[ $- == *p* ]] || exec "$BASH" -p "$0" "$@" # without functions that the caller exports
set -euo pipefail
source "$(dirname "$0")/launch.sh"
show_help "$@"

[ $# -ge 3 ] || fail "usage: bash scripts/one_node_train.sh TRAIN_HOURS SAVE_NAME BATCH_SIZE" \
    "[-- TRAINING OPTIONS]"
if [[ $# -ge 5 && $2 =~ ^[0-9]+$ && $3 =~ ^[0-9]+$ && $4 != -* ]]; then
    given=MASTER_ADDR=${MASTER_ADDR:-IP}
    for name in DATA ARCH SCRIPT NPROC; do
        [ -z "${!name:-}" ] || printf -v given '%s %s=%q' "$given" "$name" "${!name}"
    done
    fail "these are arguments of multi_node_train.sh (IP is the address of node 0):" \
        "$given bash$(printf ' %q' "$root/scripts/multi_node_train.sh" "$@")"
fi
unset MASTER_ADDR MASTER_PORT WORLD_SIZE NODE_RANK # left over from a job on several nodes
launch "$@"
