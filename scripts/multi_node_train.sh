#!/usr/bin/env bash
# Train on several machines: run this on each of them, with its own NODE_RANK.
#
#   MASTER_ADDR=IP bash scripts/multi_node_train.sh \
#       TRAIN_HOURS NODE_RANK NODES SAVE_NAME BATCH_SIZE [-- TRAINING OPTIONS]
#
#   TRAIN_HOURS  stop with a snapshot after this many hours of training (3.0).
#                Epochs are then unlimited and the learning rate constant,
#                unless --epochs or --recipe is given
#   NODE_RANK    0 on the machine that writes the run directory, 1, 2, ...
#                on the others
#   NODES        number of machines
#   SAVE_NAME    name of the run, in runs/SAVE_NAME; an existing run is resumed
#   BATCH_SIZE   images per step and process (per GPU)
#
# MASTER_ADDR is the IP address at which the others reach node 0. MASTER_PORT
# (8888) is a free port there. Also in the environment: DATA, ARCH, SCRIPT, NPROC;
# see scripts/launch.sh.
[[ $- == *p* ]] || exec "$BASH" -p "$0" "$@" # without functions that the caller exports
set -euo pipefail
source "$(dirname "$0")/launch.sh"
show_help "$@"

[ $# -ge 5 ] || fail "usage: MASTER_ADDR=IP bash scripts/multi_node_train.sh TRAIN_HOURS NODE_RANK" \
    "NODES SAVE_NAME BATCH_SIZE [-- TRAINING OPTIONS]"
need_number NODE_RANK "$2" '[0-9]+' "a whole number"
need_number NODES "$3" '[1-9][0-9]*' "a whole number, at least 1"
[ "$2" -lt "$3" ] || fail "NODE_RANK $2 is not one of 0 to $(($3 - 1))"
need_master
MASTER_PORT=${MASTER_PORT:-8888} preflight=("$2" "$3") log=node$2.log
torchrun=("--nnodes=$3" "--node_rank=$2" "--master_addr=$MASTER_ADDR" "--master_port=$MASTER_PORT")
launch "$1" "${@:4}"
